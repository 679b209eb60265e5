"""Measured speeds of devices, and whether a run takes another plan for them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hpctrain.planner import make_plan
from hpctrain.planner.adapt.decision import AdaptLimits, PlanChange, Situation, decide, judge, same_layout
from hpctrain.planner.adapt.measured import SpeedTracker, measured_topology
from hpctrain.planner.adapt.slow_links import message_groups
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.replan.calibration import passes_s
from hpctrain.planner.replan.replan import TopologyChanges, apply_changes
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.history.rank_log import PeerTraffic, RankRow
from hpctrain.records.history.run_log import BytesSent, MetricRow
from hpctrain.records.plan.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_annealing")]

WINDOW = 10


class Machine:
    """A machine whose devices compute as the cost model says, at speeds that a test changes."""

    def __init__(self, run, topology, machine_factor=1.0, noise=0.0):
        self.run, self.spec, self.topology = run, run.spec(), topology
        self.machine_factor = machine_factor
        self.noise, self.rng = noise, random.Random(1)
        self.tracker = SpeedTracker(run, self.spec, topology)
        self.step = 0

    def begin(self, plan: Plan, addresses=None):
        self.plan, self.rows = plan, []
        self.tracker.begin(plan, addresses)

    def train(self, steps, links=None, **slow):
        """Make steps, with nodes slower by these factors and links with these factors on their bandwidth, and show them
        to the tracker. Whoever does not compute waits for messages."""
        changes = TopologyChanges(slow={name: 1 / factor for name, factor in slow.items()}, links=links or {})
        changed = apply_changes(self.topology, changes)
        scene = layout_of_plan(self.run, self.spec, self.plan, changed)
        stages = range(len(self.plan.stages))
        passes = [[self._passes_s(scene, replica, stage) for stage in stages] for replica in range(self.plan.dp)]
        step_s = self.machine_factor * predict(scene.cost, scene.layout, whole=True).total
        for _ in range(steps):
            self.step += 1
            stage_s = [max(replica[stage] for replica in passes) for stage in stages]
            self.rows.append(metric_row(self.run, self.plan, self.step, step_s, stage_s))
            if self.step % WINDOW == 0:
                self.tracker.add(rank_rows(self.plan, passes, self.step, step_s))

    def _passes_s(self, scene, replica, stage):
        return self.machine_factor * passes_s(scene, replica, stage) * (1 + self.rng.uniform(-self.noise, self.noise))

    def situation(self, **fields):
        values = {"mode": "online", "after": 64, "asked": False, "began": 0, "move_s": 1.0}
        return Situation(
            self.run, self.spec, self.topology, self.plan, self.tracker.measured(), self.rows, **(values | fields)
        )


def rank_rows(plan, passes, step, step_s=None):
    """Rows of a window: passes[replica][stage] are seconds; with `step_s`, waits fill the step."""
    owner, mesh = plan.stage_owner(), plan.mesh()

    def wait_s(replica, pp):
        return 0.0 if step_s is None else step_s - sum(passes[replica][stage] for stage in owner if owner[stage] == pp)

    return [
        RankRow(
            step=step, steps=WINDOW, generation=0, rank=rank, device=plan.ranks[rank],
            stages=(stages := [stage for stage in owner if owner[stage] == pp]),
            forward_s=[passes[replica][stage] / 3 for stage in stages],
            backward_s=[2 * passes[replica][stage] / 3 for stage in stages],
            wait_pp_s=wait_s(replica, pp) if plan.pp > 1 else 0.0,
            wait_dp_s=wait_s(replica, pp) if plan.pp == 1 else 0.0,
            wait_world_s=0.0, wait_device_s=0.0, hidden_dp_s=0.0, memory_bytes=1e6,
        )
        for pp, column in enumerate(mesh)
        for replica, group in enumerate(column)
        for rank in group
    ]  # fmt: skip


def metric_row(run, plan, step, step_s, stage_s):
    tokens = plan.sequences * run.data.seq_len
    return MetricRow(
        step=step, generation=0, time_s=0.0, step_time_s=step_s, loss=1.0, lr=1e-3, tokens=tokens, samples=0,
        tokens_per_s=tokens / step_s, bytes_sent=BytesSent(), stage_time_s=stage_s,
        micro_batches=[replica.micro_batches for replica in plan.replicas],
    )  # fmt: skip


@pytest.fixture
def machine(run, topology):
    def make(nodes=4, steps=10_000, machine_factor=1.0, noise=0.0, **fields):
        asked = run(steps=steps, rows=32, dims={"layers": 12, "dim": 512}, **fields)
        made = Machine(asked, topology([1.0] * nodes), machine_factor, noise)
        made.begin(make_plan(asked, made.spec, made.topology))
        return made

    return make


REPLICAS = {"mode": "fixed", "pp": 1, "dp": 4}
PIPELINE = {"mode": "fixed", "pp": 4, "dp": 1, "schedule": "1f1b"}


@pytest.mark.parametrize("parallel", [REPLICAS, PIPELINE, {"mode": "fixed", "pp": 2, "dp": 2, "schedule": "1f1b"}])
@pytest.mark.parametrize("machine_factor", [1.0, 1.7])
def test_a_node_that_became_slower_has_its_measured_speed(machine, parallel, machine_factor):
    made = machine(parallel=parallel, machine_factor=machine_factor, noise=0.02)
    made.train(100)
    assert made.tracker.measured().changes == TopologyChanges()
    made.train(60, local2=2.0)
    speeds = made.tracker.measured()
    assert dict(speeds.changes.slow) == {"local2": pytest.approx(0.5, rel=0.06)}
    assert not speeds.changes.slow_devices
    assert speeds.steady_since == 101
    assert "local2:cpu0 computes 2 times as long as predicted, relative to the others" in speeds.reasons()[0]


def test_replicas_show_a_node_that_was_slow_from_the_beginning(machine):
    made = machine(parallel=REPLICAS)
    made.train(60, local1=1.5)
    assert dict(made.tracker.measured().changes.slow) == {"local1": pytest.approx(1 / 1.5, rel=0.06)}


def test_a_part_that_is_predicted_badly_is_no_slow_device(machine):
    """The head takes twice as long as predicted, in every window: no other device holds such a part, so it is not the
    device that is slow."""
    made = machine(parallel=PIPELINE)
    scene = layout_of_plan(made.run, made.spec, made.plan, made.topology)
    passes = [[passes_s(scene, 0, stage) * (2 if stage == 3 else 1) for stage in range(4)]]
    for step in range(10, 200, 10):
        made.tracker.add(rank_rows(made.plan, passes, step))
    assert made.tracker.measured().changes == TopologyChanges()


def test_a_node_that_is_equally_slow_in_a_later_plan_keeps_its_speed(machine):
    made = machine(parallel=PIPELINE)
    made.train(60)
    made.train(60, local1=2.0)
    speeds = made.tracker.measured()
    changed = apply_changes(made.topology, speeds.changes)
    made.begin(make_plan(made.run, made.spec, changed))
    made.train(60, local1=2.0)
    assert dict(made.tracker.measured().changes.slow) == {"local1": pytest.approx(0.5, rel=0.1)}
    made.train(60)
    assert made.tracker.measured().changes == TopologyChanges(), "it recovered"


def test_a_node_that_the_plan_leaves_out_keeps_the_speed_that_was_measured_last(machine):
    made = machine(parallel=REPLICAS)
    made.train(60)
    made.train(60, local3=3.0)
    left = made.topology.only(["local0", "local1", "local2"])
    anyhow = made.run.model_copy(update={"parallel": made.run.parallel.model_copy(update={"dp": 3})})
    made.begin(make_plan(anyhow, made.spec, left))
    assert dict(made.tracker.measured().changes.slow) == {"local3": pytest.approx(1 / 3, rel=0.06)}


def test_rows_of_another_plan_and_cut_off_windows_are_skipped(machine):
    made = machine(parallel=REPLICAS)
    made.train(60)
    before = made.tracker.measured()
    rows = rank_rows(made.plan, [[99.0]] * 4, 70)
    made.tracker.add([row.model_copy(update={"device": "elsewhere:cpu0"}) for row in rows])
    made.tracker.add([*rows[:3], rows[3].model_copy(update={"rank": 9})])
    made.tracker.add([row.model_copy(update={"forward_s": [float("nan")], "step": 80}) for row in rows])
    made.tracker.add([row.model_copy(update={"step": 90}) for row in rows[:3]])
    assert made.tracker.measured() == before


def test_rows_give_the_same_speeds_one_by_one_and_all_at_once(machine):
    made = machine(parallel=REPLICAS)
    made.train(60)
    made.train(60, local0=1.4)
    passes = lambda factor: [[factor], [1.0], [1.0], [1.0]]  # noqa: E731
    rows = [row for step in range(10, 200, 10) for row in rank_rows(made.plan, passes(1 + (step > 100)), step)]
    whole = measured_topology(made.run, made.spec, made.topology, [(made.plan, rows)])
    tracker = SpeedTracker(made.run, made.spec, made.topology)
    tracker.begin(made.plan)
    for row in rows:
        tracker.add([row])
    assert tracker.measured() == whole


def test_a_slow_node_gets_less_work_and_its_work_back(machine):
    made = machine()
    made.train(100)
    first = decide(made.situation())
    assert (first.plan, first.made) == (None, True)
    assert first.reason == "the present plan is the best one found for the measured speeds"
    decided = made.step
    made.train(30, local2=2.0)
    assert decide(made.situation(decided=decided)).reason == "no device's speed has changed since the last decision"
    made.train(20, local2=2.0)
    slow = decide(made.situation(decided=decided))
    assert slow.plan is not None, slow.reason
    assert slow.plan.topology_sha256 == made.topology.sha256()
    assert slow.predicted_s < 0.8 * slow.before_s
    assert slow.reason.startswith("local2:cpu0 computes 2 times as long as predicted")
    move = PlanChange(made.step, made.plan, slow.plan, slow.before_s, slow.predicted_s)
    made.begin(slow.plan)
    made.train(99, local2=2.0)
    assert judge(move, made.rows, made.tracker.measured()) is None
    made.train(1, local2=2.0)
    verdict = judge(move, made.rows, made.tracker.measured())
    assert verdict.measured_s == pytest.approx(slow.predicted_s, rel=0.1)
    assert not verdict.take_back
    assert verdict.reason.endswith("it came true")
    decided = made.step
    made.train(90)
    again = decide(made.situation(decided=decided, moves=[move]))
    assert again.reason == "speeds have not changed for 90 steps, and after 1 moves it must be 100"
    early = decide(made.situation(decided=decided, moves=[replace(move, corrects_probe=True)]))
    assert early.plan is not None
    made.train(10)
    again = decide(made.situation(decided=decided, moves=[move]))
    assert again.predicted_s == pytest.approx(made.rows[-1].step_time_s * 0.8, rel=0.3)
    made.begin(again.plan)
    made.train(20)
    assert made.rows[-1].step_time_s < 0.8 * slow.before_s


def test_nothing_is_gained_near_the_end(machine):
    made = machine(steps=160)
    made.train(100)
    made.train(50, local2=2.0)
    answer = decide(made.situation(move_s=1000.0))
    assert (answer.plan, answer.made) == (None, True)
    assert "10 steps that remain, and a move needs 33 min 20 s, 2 times its price" in answer.reason
    assert decide(made.situation(move_s=0.1)).plan is not None


def test_cases_in_which_the_plan_stays(machine):
    made = machine()
    made.train(100)
    made.train(50, local2=2.0)
    situation = made.situation()
    for fields, reason in (
        ({"mode": "off"}, "adapt.mode is off"),
        ({"edited": True}, "a person wrote or edited the plan, so it is obeyed"),
        ({"mode": "once", "decided": 64}, "adapt.mode is once, and plans were compared"),
        ({"after": 1000}, "the first decision is made after 1000 steps, and 150 are done"),
        ({"rows": ()}, "the first decision is made after 64 steps, and 0 are done"),
    ):
        answer = decide(replace(situation, **fields))
        assert (answer.plan, answer.made) == (None, False)
        assert reason in answer.reason
    assert decide(situation).plan is not None


def test_one_device_has_no_other_plan(machine):
    made = machine(nodes=1)
    made.train(200)
    assert decide(made.situation()).reason == "there is one device, so there is no other plan"


def test_fixed_degrees_are_adapted_if_somebody_asked(machine):
    made = machine(parallel=PIPELINE)
    made.train(100)
    made.train(50, local1=2.0)
    assert "parallel.mode is fixed" in decide(made.situation()).reason
    answer = decide(made.situation(asked=True))
    assert answer.plan.dims == made.plan.dims
    assert not same_layout(answer.plan, made.plan)


def test_a_machine_that_is_slower_as_a_whole_keeps_its_plan(machine):
    made = machine(machine_factor=1.8)
    made.train(200)
    assert decide(made.situation()).plan is None


def test_a_plan_that_is_worse_than_before_is_taken_back_and_not_taken_again(machine):
    made = machine()
    made.train(100)
    made.train(50, local2=2.0)
    answer = decide(made.situation())
    move = PlanChange(made.step, made.plan, answer.plan, answer.before_s, answer.predicted_s)
    rows = [row.model_copy(update={"step": made.step + 1 + number, "step_time_s": 1.01 * answer.before_s})
            for number, row in enumerate(made.rows[:100])]  # fmt: skip
    verdict = judge(move, rows, replace(made.tracker.measured(), changed_at=None))
    assert verdict.take_back
    assert verdict.reason.endswith("so the plan before it is taken again")
    back = PlanChange(made.step + 100, answer.plan, made.plan, 1.01 * answer.before_s, answer.before_s, takes_back=True)
    made.train(500, local2=2.0)
    again = decide(made.situation(moves=[move, back]))
    assert again.made
    assert again.plan is None or not same_layout(again.plan, answer.plan)


def test_a_plan_is_not_judged_by_a_machine_that_changed(machine):
    made = machine()
    made.train(100)
    move = PlanChange(0, made.plan, made.plan, made.rows[0].step_time_s, made.rows[0].step_time_s)
    made.train(100, local1=3.0)
    speeds = made.tracker.measured()
    verdict = judge(move, made.rows, speeds)
    assert "the speed of a device changed since" in verdict.reason
    assert not verdict.take_back
    # A change ends the wait for 100 steps; one that may be under way makes it twice as long.
    assert judge(move, made.rows[:60], speeds) is not None
    may_change = replace(speeds, changed_at=None, undecided=True)
    assert judge(move, made.rows[:199], may_change) is None
    assert judge(move, made.rows, may_change) is not None
    assert judge(move, made.rows[:150], replace(may_change, undecided=False)) is not None


@pytest.mark.parametrize(("half_period", "factor"), [(4, 2.4), (10, 3.0), (16, 2.6), (18, 1.6), (19, 2.1)])
def test_a_flapping_node_moves_a_run_twice_at_most(machine, half_period, factor):
    made = machine(nodes=2, noise=0.01)
    moves, decided = [], None
    for window in range(120):
        slow = {"local1": factor} if window // half_period % 2 else {}
        made.train(WINDOW, **slow)
        now = made.situation(decided=decided, moves=moves)
        answer = decide(now)
        corrects_probe = decided is None and now.speeds.changed_at is None
        decided = made.step if answer.made else decided
        if answer.plan is not None:
            times_s = answer.before_s, answer.predicted_s
            moves.append(PlanChange(made.step, made.plan, answer.plan, *times_s, corrects_probe=corrects_probe))
            made.begin(answer.plan)
    assert 1 <= len(moves) <= 2


def test_a_thousand_noisy_steps_move_nothing(machine):
    made = machine(noise=0.08)
    decided = None
    for _ in range(100):
        made.train(WINDOW)
        answer = decide(made.situation(decided=decided), AdaptLimits())
        decided = made.step if answer.made else decided
        assert answer.plan is None
    assert decided is not None


PAIR = ("local0", "local1")


@pytest.mark.parametrize("parallel", [{"mode": "fixed", "pp": 2, "dp": 1}, {"mode": "fixed", "pp": 1, "dp": 2}])
def test_a_slow_link_between_two_nodes_has_its_measured_bandwidth_until_it_recovers(machine, parallel):
    made = machine(nodes=2, parallel=parallel)
    made.train(100)
    assert made.tracker.measured().links == {}
    made.train(60, links={PAIR: 0.02})
    speeds = made.tracker.measured()
    assert dict(speeds.links) == {PAIR: pytest.approx(0.02, rel=0.2)}
    assert speeds.changes.links == speeds.links
    assert not speeds.changes.slow
    assert speeds.changed_at == 140
    assert speeds.reasons() == ["messages between local0 and local1 travel at 0.02 of the bandwidth that was measured"]
    made.train(60)
    assert made.tracker.measured().links == {}


def test_a_slow_device_is_no_slow_link(machine):
    made = machine(nodes=2, parallel={"mode": "fixed", "pp": 2, "dp": 1})
    made.train(100)
    made.train(100, local0=3.0)
    made.train(100)
    speeds = made.tracker.measured()
    assert speeds.links == {}
    assert [change.key for change in speeds.speed_changes] == ["local0:cpu0"] * 2


def test_a_machine_that_is_slower_as_a_whole_has_no_slow_links(machine):
    made = machine(nodes=2, parallel={"mode": "fixed", "pp": 2, "dp": 1})
    made.train(100)
    made.machine_factor = 3.0
    made.train(100)
    assert made.tracker.measured().links == {}


def test_links_that_groups_share_are_told_apart(machine):
    """Four nodes, two pipelines: the replicas of the second stage wait longer for their sums."""
    made = machine(parallel={"mode": "fixed", "pp": 2, "dp": 2, "schedule": "1f1b"})
    groups = message_groups(made.plan)
    assert [group.axis for group in groups] == ["pp", "pp", "dp", "dp"]
    assert len({pair for group in groups for pair in group.pairs}) == 4
    slow = groups[3]
    for step in range(10, 300, 10):
        rows = rank_rows(made.plan, [[0.1, 0.1]] * 2, step)
        waits = [0.2 if row.rank in slow.ranks and step > 100 else 0.01 for row in rows]
        made.tracker.add([row.model_copy(update={"wait_dp_s": wait}) for row, wait in zip(rows, waits, strict=True)])
    assert set(made.tracker.measured().links) == set(slow.pairs)


def test_rows_do_not_say_which_link_of_a_ring_is_slow(machine):
    made = machine(parallel=REPLICAS)
    made.train(100)
    made.train(60, links={("local1", "local2"): 0.01})
    speeds = made.tracker.measured()
    assert speeds.links == {}
    assert len(speeds.suspects) == 6
    assert ("local1", "local2") in speeds.suspects


@pytest.mark.parametrize(
    ("slow", "confirmed"),
    [
        # A ring sends around: local0 and local2 never send to each other.
        ([("local1", "local2")], [("local1", "local2")]),
        (
            [("local1", "local2"), ("local2", "local3")],
            [("local0", "local2"), ("local1", "local2"), ("local2", "local3")],
        ),
        ([], []),
    ],
)
def test_what_kernels_counted_confirms_suspects(machine, slow, confirmed):
    made, ring = machine(parallel=REPLICAS), [1, 2, 3, 0]
    made.begin(made.plan, {f"10.0.0.{node}": f"local{node}" for node in range(4)})

    def train(steps, factor):
        for step in range(made.step + 10, made.step + steps + 1, 10):
            rows = []
            for row in rank_rows(made.plan, [[1.0]] * 4, step):
                node, other = row.rank, ring[row.rank]
                pair = tuple(sorted((f"local{node}", f"local{other}")))
                busy_s = 0.1 / (factor if pair in slow else 1.0)
                traffic = [PeerTraffic(address=f"10.0.0.{other}", sent_bytes=1 << 20, busy_s=busy_s)]
                wait_s = 0.1 if factor == 1.0 else 1.0
                rows.append(
                    row.model_copy(update={"wait_dp_s": wait_s, "traffic": traffic if step % 20 == 0 else None})
                )
            made.tracker.add(rows)
        made.step += steps

    train(100, 1.0)
    train(100, 0.1)
    speeds = made.tracker.measured()
    assert dict(speeds.links) == {pair: pytest.approx(0.1) for pair in confirmed}
    assert len(speeds.suspects) == (0 if slow else 6)
    train(100, 1.0)
    assert made.tracker.measured().links == {}


@pytest.mark.parametrize("spares", [0, 1])
def test_a_run_leaves_a_slow_link_for_a_node_that_was_idle(machine, spares):
    made = machine(nodes=3, parallel={"mode": "fixed", "pp": 2, "dp": 1}, recovery={"spares": spares})
    made.train(100)
    ((pair,),) = [group.pairs for group in message_groups(made.plan)]
    made.train(60, links={pair: 0.01})
    answer = decide(made.situation(decided=100, asked=True))
    assert answer.plan is not None, answer.reason
    assert answer.reason.startswith(f"messages between {pair[0]} and {pair[1]} travel at 0.01")
    assert len(answer.plan.nodes) == 2
    before_s = made.rows[-1].step_time_s
    made.begin(answer.plan)
    made.train(10, links={pair: 0.01})
    assert made.rows[-1].step_time_s == pytest.approx(answer.predicted_s, rel=0.1)
    assert made.rows[-1].step_time_s < 0.9 * before_s


def test_a_slow_node_changes_place_with_a_spare(machine):
    made = machine(nodes=4, recovery={"spares": 1})
    made.train(100)
    (spare,) = {node.id for node in made.topology.nodes} - set(made.plan.nodes)
    slow = made.plan.nodes[0]
    made.train(60, **{slow: 3.0})
    answer = decide(made.situation(decided=100))
    assert slow not in answer.plan.nodes
    assert spare in answer.plan.nodes
