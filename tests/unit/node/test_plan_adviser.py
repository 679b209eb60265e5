"""A run that is told to take another plan: what is written, what the next generation runs, and when nothing changes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from steps_made import rows_made, truth

from hpctrain.agent.decide import FOR_NEW_PLAN
from hpctrain.agent.event_log import EventLog, note_start
from hpctrain.agent.generation_store import Proposal, ProposedGeneration
from hpctrain.agent.worker_messages import ChangePlanOrder
from hpctrain.node.generation_maker import GenerationMaker
from hpctrain.node.plan_adviser import RunPlanAdviser
from hpctrain.planner.adapt.decision import AdaptDecision, decide
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.replan.calibration import passes_s
from hpctrain.planner.replan.replan import TopologyChanges, apply_changes
from hpctrain.records.history.generation import Generation, Member
from hpctrain.records.history.memory_state import HeldState
from hpctrain.records.history.rank_log import RANK_LOG, RankRow
from hpctrain.records.history.run_log import Event, read_events
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.adapt import Adapt
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_annealing")]

NODES = ("a", "b", "c")
REPLICAS = {"mode": "fixed", "dp": 3, "micro_batch": 1}
WINDOW = 10


def topology_of(nodes: tuple[str, ...]) -> Topology:
    device = Device(
        id="cpu0", type="cpu", flops={"fp32": 1e10}, memory_bytes=4e9, memory_bytes_per_s=5e9, launch_s=2e-7
    )
    return Topology(
        provenance=Provenance(version="0", created="2099-01-01T00:00:00Z", transport="tcp"),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=name, addr="127.0.0.1", devices=[device]) for name in nodes],
        fabric=Fabric(classes=[LinkClass(id="all", alpha_s=4e-5, beta_s_per_byte=5e-10, pairs=3)]),
    )


class Job:
    """A run folder, with a generation that makes steps as the cost model says, at speeds that a test chooses."""

    def __init__(
        self, folder: Path, adapt: dict[str, Any], nodes: tuple[str, ...] = NODES, parallel: Any = REPLICAS,
        steps: int = 100_000,
    ) -> None:  # fmt: skip
        self.folder, self.nodes, self.topology = folder, nodes, topology_of(nodes)
        self.run = Run.model_validate(
            {
                "steps": steps, "model": {"dims": {"layers": 12, "dim": 256, "heads": 4, "vocab": 256}},
                "batch": {"global": 12}, "data": {"train": ["d"], "seq_len": 64}, "parallel": parallel, "adapt": adapt,
            }
        )  # fmt: skip
        self.run.write(folder / "run.yaml")
        self.topology.write(folder / "topology.json")
        self.log = EventLog(folder / "events.jsonl", nodes[0], 0, FakeClock())
        self.maker = GenerationMaker(folder, self.run, nodes, self.log)
        self.members = tuple(Member(node=node, incarnation=node, addr="127.0.0.1", store_port=1) for node in nodes)
        self.record: Generation | None = None
        self.step = 0
        self.enter("start")
        self.new_agent()

    def new_agent(self) -> None:
        """Another agent gets rank 0, and knows nothing of what was asked before."""
        self.adviser = RunPlanAdviser(self.folder, self.run, self.nodes, self.log, 0)

    def enter(self, reason: str, lost: str = "") -> Generation:
        """The next generation, from the state in memory at the present step."""
        members = tuple(member for member in self.members if member.node != lost)
        held: dict[str, tuple[HeldState, ...]] = {}
        if self.record is not None:
            state = HeldState(
                generation=self.record.number, plan_sha256=self.plan.sha256(), rank=0, step=self.step, size_bytes=1
            )
            held = {
                device.node: (state.model_copy(update={"rank": rank}),)
                for rank, device in enumerate(self.plan.ranks)
                if device.node != lost
            }
        number = 0 if self.record is None else self.record.number + 1
        proposed: ProposedGeneration = self.maker.make(
            Proposal(number, 0, members, self.record, reason, members[0].incarnation, held)
        )
        proposed.announce()
        proposed.save_plan()
        note_start(self.log, proposed.record, proposed.plan, self.step)
        proposed.record.write(self.folder / "generations" / f"gen-{number:06d}.json")
        self.record, self.plan = proposed.record, proposed.plan
        return self.record

    def train(self, steps: int, **slow: float) -> None:
        """Make steps, with nodes slower by these factors."""
        assert self.record is not None
        changed = apply_changes(self.topology, TopologyChanges(slow={node: 1 / by for node, by in slow.items()}))
        scene = layout_of_plan(self.run, self.run.spec(), self.plan, changed)
        made = rows_made(self.plan, self.run, changed, truth(), steps, self.record.number)
        start_s = FakeClock().wall() + self.step
        rows = [row.model_copy(update={"step": row.step + self.step, "time_s": start_s + row.step}) for row in made]
        append(self.folder / "metrics.jsonl", [row.to_json() for row in rows])
        for _ in range(steps):
            self.step += 1
            if self.step % WINDOW == 0:
                append(self.folder / RANK_LOG, [self._rank_row(rank, scene).to_json() for rank in self._ranks()])

    def _ranks(self) -> range:
        return range(self.plan.world_size)

    def _rank_row(self, rank: int, scene: Any) -> RankRow:
        assert self.record is not None
        device = self.plan.ranks[rank]
        replica, stage = next(
            (replica, stage)
            for replica, part in enumerate(self.plan.replicas)
            for stage, devices in enumerate(part.devices)
            if device in devices
        )
        passes = passes_s(scene, replica, stage)
        return RankRow(
            step=self.step, steps=WINDOW, generation=self.record.number, rank=rank, device=device, stages=[stage],
            forward_s=[passes / 3], backward_s=[2 * passes / 3],
            wait_pp_s=0.0, wait_dp_s=0.0, wait_world_s=0.0, wait_device_s=0.0, hidden_dp_s=0.0, memory_bytes=1e6,
        )  # fmt: skip

    def advise(self) -> ChangePlanOrder | None:
        assert self.record is not None
        return self.adviser.advise(self.record, self.step)

    def shares(self) -> dict[str, int]:
        return {replica.devices[0][0].node: replica.sequences for replica in self.plan.replicas}

    def work(self) -> Counter[str]:
        """Return node -> the blocks that it computes in a step, counted once for each sequence."""
        done: Counter[str] = Counter()
        for replica in self.plan.replicas:
            for stage, devices in zip(self.plan.stages, replica.devices, strict=True):
                done[devices[0].node] += replica.sequences * (stage.layers[1] - stage.layers[0])
        return done

    def events(self, kind: str) -> list[Event]:
        return [event for event in read_events(self.folder / "events.jsonl") if event.kind == kind]


def append(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


ONCE, ONLINE = {"mode": "once", "after": 40}, {"mode": "online", "after": 40}


def test_another_plan_is_run_from_the_state_in_memory_and_judged_100_steps_later(tmp_path: Path) -> None:
    job = Job(tmp_path, ONLINE)
    assert job.shares() == {"a": 4, "b": 4, "c": 4}
    job.train(30, c=2.0)
    assert job.advise() is None  # too early
    job.train(30, c=2.0)
    order = job.advise()
    assert order == ChangePlanOrder(save=False)
    job.train(7, c=2.0)  # until the step after which the workers stop
    record = job.enter(FOR_NEW_PLAN)
    assert job.shares() == {"a": 5, "b": 5, "c": 2}
    assert record.memory is not None
    assert (record.memory.step, record.failures) == (67, 0)
    (adapted,) = job.events("adapted")
    assert record.reason == adapted.reason
    assert adapted.reason.startswith("c:cpu0 computes 2 times as long as predicted")
    assert Plan.read(tmp_path / adapted.data["plan"]) == job.plan
    predicted_s = adapted.data["predicted_step_time_s"]
    assert predicted_s < adapted.data["measured_step_time_s"]

    job.train(90, c=2.0)
    assert job.advise() is None
    job.new_agent()
    job.train(20, c=2.0)
    assert job.advise() is None
    (measured,) = job.events("adaptation_measured")
    assert (measured.generation, measured.data["kept"]) == (1, True)
    assert measured.data["measured_step_time_s"] == pytest.approx(predicted_s, rel=0.1)
    job.train(20, c=2.0)
    assert job.advise() is None
    assert len(job.events("adaptation_measured")) == 1


def test_a_plan_that_makes_steps_longer_is_taken_back(tmp_path: Path) -> None:
    job = Job(tmp_path, ONLINE)
    first = job.plan
    job.train(60, c=2.0)
    assert job.advise() is not None
    job.enter(FOR_NEW_PLAN)
    job.train(120, a=3.0, b=3.0, c=6.0)  # whatever the reason is: relative to each other, the nodes are as they were
    assert job.advise() is not None
    (measured,) = job.events("adaptation_measured")
    assert not measured.data["kept"]
    record = job.enter(FOR_NEW_PLAN)
    assert job.plan.replicas == first.replicas
    assert record.reason == measured.reason == job.events("adapted")[-1].reason
    assert [event.data["taken_back"] for event in job.events("adapted")] == [False, True]
    assert [event.data["corrects_probe"] for event in job.events("adapted")] == [True, False]
    assert len(job.events("adapted")) == 2


def test_a_fault_before_all_ranks_have_stopped_is_an_ordinary_recovery(tmp_path: Path) -> None:
    job = Job(tmp_path, ONLINE)
    job.train(60, c=2.0)
    assert job.advise() is not None
    before = job.plan
    record = job.enter("a worker of b was killed by signal 9")
    assert job.plan == before
    assert (record.reason, record.failures) == ("a worker of b was killed by signal 9", 1)
    assert job.events("adapted") == []


def test_a_plan_after_a_fault_counts_as_a_change_and_does_not_correct_the_probe(tmp_path: Path) -> None:
    job = Job(tmp_path, ONLINE)
    job.train(10)
    job.enter("a worker of b was killed by signal 9")
    job.train(60, c=2.0)
    assert job.advise() is not None
    job.enter(FOR_NEW_PLAN)
    assert [event.data["corrects_probe"] for event in job.events("adapted")] == [False]


def test_a_node_that_is_lost_while_ranks_stop_leads_to_a_plan_for_the_others(tmp_path: Path) -> None:
    job = Job(tmp_path, ONLINE)
    job.train(60, c=2.0)
    assert job.advise() is not None
    job.enter(FOR_NEW_PLAN, lost="b")
    assert "b" not in job.plan.nodes
    assert (len(job.events("replanned")), job.events("adapted")) == (1, [])


def test_files_of_another_plan_that_cannot_be_used_leave_the_present_one(tmp_path: Path) -> None:
    job = Job(tmp_path, ONLINE)
    job.train(60, c=2.0)
    assert job.advise() is not None
    (tmp_path / "generations" / "adapted-000000.json").write_text("{")
    before = job.plan
    job.enter(FOR_NEW_PLAN)
    assert job.plan == before


def test_mode_once_compares_plans_once(tmp_path: Path) -> None:
    job = Job(tmp_path, ONCE)
    job.train(60)
    assert job.advise() is None  # the present plan is the best
    job.train(200, c=3.0)
    assert job.advise() is None
    (tmp_path / "online").mkdir()
    online = Job(tmp_path / "online", ONLINE)
    online.train(60)
    assert online.advise() is None
    online.train(200, c=3.0)
    assert online.advise() is not None


def test_one_node_and_the_end_of_a_run_leave_the_plan_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = Job(tmp_path / "one", ONLINE, nodes=("a",), parallel={"mode": "auto"})
    one.train(100, a=3.0)
    assert one.advise() is None
    (tmp_path / "end").mkdir()
    end = Job(tmp_path / "end", ONLINE, steps=61)
    end.train(60, c=2.0)
    assert end.advise() is None


@pytest.mark.parametrize(
    ("adapt", "edited", "changes"), [({}, False, True), ({}, True, False), ({"mode": "online"}, True, True)]
)
def test_a_plan_by_hand_runs_as_it_is_until_adapting_is_asked_for(
    tmp_path: Path, adapt: dict[str, Any], edited: bool, changes: bool
) -> None:
    """The plan of the planner changes without the key `adapt.mode`; that of a person only with it."""
    job = Job(tmp_path, {"after": 40, **adapt}, parallel={"mode": "auto"})
    if edited:
        job.plan.model_copy(update={"notes": ["edited"]}).write(tmp_path / "plan.json")
        job.record = None
        for file in (tmp_path / "generations").glob("gen-*"):
            file.unlink()
        job.enter("start")
        job.new_agent()
    assert job.plan.is_edited is edited
    slow = max(job.plan.nodes)
    job.train(60, **{slow: 2.0})
    assert (job.advise() is not None) is changes


def test_a_deterministic_run_keeps_its_plan_unless_adapting_is_asked_for(tmp_path: Path) -> None:
    run = Job(tmp_path, ONLINE).run.model_copy(update={"deterministic": True})
    assert run.adapt_mode == "online"
    silent = run.model_copy(update={"adapt": Adapt()})
    assert silent.adapt_mode == "off"
    assert silent.model_copy(update={"deterministic": False}).adapt_mode == "online"


def test_steps_during_a_search_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search slows the node down on which it runs; without it, these steps would show a slow node."""
    job = Job(tmp_path, ONLINE)

    def busy(*arguments: Any) -> AdaptDecision:
        if len(searches) == 0:
            job.train(60, a=2.0)
        searches.append(decide(*arguments))
        return searches[-1]

    searches: list[AdaptDecision] = []
    monkeypatch.setattr("hpctrain.node.plan_adviser.decide", busy)
    job.train(60)
    assert job.advise() is None
    job.train(60)
    assert job.advise() is None
    assert [search.made for search in searches] == [True, False]
    job.train(60, a=2.0)
    assert job.advise() is not None


@pytest.mark.parametrize("mode", ["online", "off"])
def test_a_plan_after_a_fault_is_made_for_the_measured_speeds(tmp_path: Path, mode: str) -> None:
    job = Job(tmp_path, {"mode": mode})
    job.train(60, c=3.0)
    job.enter("lost b", lost="b")
    assert not job.plan.is_edited
    assert job.plan.topology_sha256 == job.topology.only(["a", "c"]).sha256()
    work = job.work()
    assert (work["c"] < work["a"]) == (mode == "online")


def test_a_node_that_alone_holds_a_part_of_the_state_saves_it_before_it_is_left_out(tmp_path: Path) -> None:
    job = Job(tmp_path, ONLINE, parallel={"mode": "fixed", "pp": 2, "schedule": "1f1b"})
    (spare,) = set(NODES) - set(job.plan.nodes)
    job.train(60)
    assert job.advise() is None
    job.train(100, **{job.plan.nodes[1]: 6.0})
    assert job.advise() == ChangePlanOrder(save=True)
    adapted = json.loads((tmp_path / "generations" / "adapted-000000.json").read_text())
    assert set(Plan.read(tmp_path / adapted["plan"]).nodes) == {job.plan.nodes[0], spare}
