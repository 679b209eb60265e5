"""The plan of the next generation: what the run file fixes is kept on other nodes for as long as it can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from steps_made import truth, write_generation

from hpctrain.agent.event_log import EventLog
from hpctrain.agent.generation_store import Proposal
from hpctrain.base.errors import FileError, RefusedError
from hpctrain.checkpoint import published
from hpctrain.node import generation_maker
from hpctrain.node.generation_maker import GenerationMaker
from hpctrain.planner import make_plan
from hpctrain.records.history.generation import Fence, Generation, Member, StoreAddress
from hpctrain.records.history.manifest import Manifest
from hpctrain.records.history.provenance import NodeEnvironment, SoftwareVersions
from hpctrain.records.history.run_log import Event, read_events
from hpctrain.records.plan.plan import Plan, Stage
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology, Verdict
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.lost_checkpoints import restarting_from_seed

FIXED = {"mode": "fixed", "dp": 2, "zero": 1, "recompute": "full", "micro_batch": 2}


def run_of(**parallel: Any) -> Run:
    return Run.model_validate(
        {
            "steps": 4, "model": {"dims": {"layers": 4, "dim": 32, "heads": 4, "vocab": 64}}, "batch": {"global": 8},
            "data": {"train": ["d"], "seq_len": 32}, "parallel": parallel or {"mode": "auto"},
        }
    )  # fmt: skip


def topology(*names: str) -> Topology:
    device = Device(id="cpu0", type="cpu", flops={"fp32": 1e9}, memory_bytes=4e9, memory_bytes_per_s=5e9, launch_s=2e-7)
    return Topology(
        provenance=Provenance(version="0", created="2099-01-01T00:00:00Z", transport="tcp"),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=name, addr="127.0.0.1", devices=[device]) for name in names],
        fabric=Fabric(classes=[LinkClass(id="all", alpha_s=4e-5, beta_s_per_byte=5e-10, pairs=6)]),
    )


def members(*names: str) -> tuple[Member, ...]:
    return tuple(Member(node=name, incarnation=name, addr="127.0.0.1", store_port=1) for name in names)


def plan_on(folder: Path, run: Run, *names: str, before: tuple[str, ...] = ()) -> tuple[Plan, str]:
    """The plan made on these nodes, in an attempt after one on the nodes `before`, and what is told of it."""
    topology(*names).write(folder / "topology.json")
    store = StoreAddress(addr="127.0.0.1", port=1, node="n")
    previous = Generation(number=0, attempt=0, members=list(members(*before)), plan="p", store=store, reason="start")
    proposal = Proposal(1, 1, members(*names), previous if before else None, "start", "me")
    maker = GenerationMaker(folder, run, names, EventLog(folder / "events.jsonl", names[0], 1, FakeClock()))
    proposed = maker.make(proposal)
    proposed.announce()
    proposed.save_plan()
    return proposed.plan, (folder / "events.jsonl").read_text()


def test_an_attempt_on_other_nodes_keeps_what_the_run_file_fixes(tmp_path: Path) -> None:
    plan_on(tmp_path, run_of(**FIXED), "a", "b")
    plan, said = plan_on(tmp_path, run_of(**FIXED), "c", "d", before=("a", "b"))
    assert (plan.dp, plan.zero, plan.replicas[0].micro_batch) == (2, 1, 2)
    assert plan.stages[0].recompute == "full"
    assert set(plan.nodes) == {"c", "d"}
    assert "without parallel.mode fixed" not in said


def test_a_plan_with_a_node_that_the_new_probe_excludes_is_made_anew(tmp_path: Path) -> None:
    run, names = run_of(), ("a", "b")
    plan_on(tmp_path, run, *names)
    measured = Topology.read(tmp_path / "topology.json")
    store = StoreAddress(addr="127.0.0.1", port=1, node="a")
    previous = Generation(
        number=0, attempt=0, members=list(members(*names)), plan="p", store=store, reason="start", failures=3,
        newest_start=9,
    )  # fmt: skip
    maker = GenerationMaker(tmp_path, run, names, EventLog(tmp_path / "events.jsonl", "a", 1, FakeClock()))
    proposal = Proposal(1, 1, members(*names), previous, "start", "me")
    made = maker.make(proposal)
    assert set(made.plan.nodes) == {"a", "b"}
    assert (made.record.failures, made.record.newest_start) == (0, 0)  # the failures were those of another attempt

    measured.model_copy(update={"verdict": Verdict(status="warn", exclude=["b"])}).write(tmp_path / "topology.json")
    assert maker.make(proposal).plan.nodes == ["a"]


def test_a_run_that_had_saved_a_step_is_not_begun_from_the_seed(tmp_path: Path) -> None:
    plan_on(tmp_path, run_of(), "a")  # nothing was saved yet
    saved = Event(
        kind="checkpoint_saved", time_s=0, attempt=0, generation=0, node="a", reason="", data={"step": 5000}
    )  # fmt: skip
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(saved.to_json()) + "\n")
    with pytest.raises(RefusedError, match="all checkpoints are lost: step 5000 was saved, and none is there now"):
        plan_on(tmp_path, run_of(), "a")
    damaged = tmp_path / "checkpoints" / "step-00005000"
    damaged.mkdir(parents=True)
    with pytest.raises(RefusedError, match=r"can be used \(step-00005000: manifest.json is missing\)"):
        plan_on(tmp_path, run_of(), "a")
    assert damaged.exists()  # a file system may come back
    kinds = [event.kind for event in read_events(tmp_path / "events.jsonl")]
    assert kinds[-2:] == ["checkpoint_skipped", "checkpoints_lost"]
    with restarting_from_seed(RunFolder(tmp_path), 1.0):
        pass
    plan_on(tmp_path, run_of(), "a")


def save(folder: Path, run: Run, step: int) -> Path:
    """A checkpoint of the run, which holds no tensors."""
    temporary = folder / "checkpoints" / ".new"
    temporary.mkdir(parents=True)
    (temporary / ".metadata").write_bytes(b"metadata")
    manifest = Manifest(
        step=step, generation=0, samples=step, seed=0, run_sha256="", model_sha256=run.spec().sha256(), world_size=1,
        files=[published.describe_file(temporary / ".metadata")],
    )  # fmt: skip
    return published.publish(temporary, manifest, Fence(folder / "generations", 0))


def test_a_checkpoint_that_workers_found_damaged_costs_no_retry(tmp_path: Path) -> None:
    run = run_of()
    topology("a").write(tmp_path / "topology.json")
    log = EventLog(tmp_path / "events.jsonl", "a", 1, FakeClock())
    maker = GenerationMaker(tmp_path, run, ("a",), log)
    save(tmp_path, run, 10)
    save(tmp_path, run, 20)
    log.write("checkpoint_saved", 0, "", step=20)
    first = maker.make(Proposal(0, 1, members("a"), None, "start", "a")).record
    failed = maker.make(Proposal(1, 1, members("a"), first, "a worker died", "a")).record
    assert (failed.restore, failed.failures) == ("checkpoints/step-00000020", 1)

    for _ in range(2):  # two nodes report it
        maker.skip_checkpoint(failed, "step-00000020: __0_0.distcp is missing")
    older = maker.make(Proposal(2, 1, members("a"), failed, "the checkpoint is damaged", "a")).record
    assert (older.restore, older.failures, older.newest_start) == ("checkpoints/step-00000010", 1, 10)
    skipped = [event for event in read_events(tmp_path / "events.jsonl") if event.kind == "checkpoint_skipped"]
    assert [event.data for event in skipped] == [{"path": "step-00000020", "now": "skipped-step-00000020"}]

    maker.skip_checkpoint(older, "step-00000010: __0_0.distcp is missing")
    with pytest.raises(RefusedError, match=r"none of those in checkpoints can be used \(step-00000020: __0_0.distcp"):
        maker.make(Proposal(3, 1, members("a"), older, "the checkpoint is damaged", "a"))
    names = [path.name for path in published.listed(tmp_path / "checkpoints")]
    assert names == ["step-00000010", "step-00000020"]


def test_what_cannot_be_fixed_on_fewer_nodes_is_given_up_and_told_why(tmp_path: Path) -> None:
    plan, said = plan_on(tmp_path, run_of(**FIXED), "c", before=("a", "b"))
    assert plan.dp == 1
    assert "(without parallel.mode fixed: parallel: found pp 1" in said
    assert "2 devices are needed, 1 are usable" in said


def test_a_first_plan_is_refused_where_the_degrees_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="2 devices are needed, 1 are usable"):
        plan_on(tmp_path, run_of(**FIXED), "c")


def test_a_planned_plan_passes_the_check_of_plans_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of the planner is said here, not by a worker."""

    def wrong(*args: Any) -> Plan:
        return made(*args).model_copy(update={"stages": [Stage(layers=(0, 3))]})

    made = generation_maker.make_plan
    monkeypatch.setattr(generation_maker, "make_plan", wrong)
    with pytest.raises(FileError, match="stages: they hold 3 blocks, the model has 4"):
        plan_on(tmp_path, run_of(), "a")


def test_after_a_loss_only_the_node_that_takes_over_is_sent_state(tmp_path: Path) -> None:
    run, names = run_of(mode="fixed", pp=2, dp=2, schedule="1f1b"), ("a", "b", "c", "d", "e")
    topology(*names).write(tmp_path / "topology.json")
    maker = GenerationMaker(tmp_path, run, names, EventLog(tmp_path / "events.jsonl", "a", 1, FakeClock()))
    first = maker.make(Proposal(0, 1, members(*names), None, "start", "a"))
    lost, spare = first.plan.nodes[0], (set(names) - set(first.plan.nodes)).pop()
    left = members(*(name for name in names if name != lost))
    second = maker.make(Proposal(1, 1, left, first.record, "node_lost", left[0].node))
    second.announce()
    assert second.plan.moves
    assert {move.target for move in second.plan.moves} == {f"{spare}:cpu0"}
    assert all(move.source.node in first.plan.nodes for move in second.plan.moves)
    told = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert (told["kind"], told["data"]["moves"]) == ("replanned", len(second.plan.moves))


def test_a_plan_by_hand_is_replaced_where_one_of_its_nodes_takes_no_part_from_the_start(tmp_path: Path) -> None:
    run, names = run_of(), ("a", "b", "c")
    topology(*names).write(tmp_path / "topology.json")
    given = make_plan(run_of(mode="fixed", dp=2), run.spec(), topology("a", "b"))
    given.write(tmp_path / "plan.json")
    maker = GenerationMaker(tmp_path, run, names, EventLog(tmp_path / "events.jsonl", "a", 0, FakeClock()))
    assert maker.make(Proposal(0, 0, members("a", "b"), None, "start", "a")).plan == given
    without_b = maker.make(Proposal(0, 0, members("a", "c"), None, "start", "a"))
    without_b.announce()
    without_b.save_plan()
    assert set(without_b.plan.nodes) <= {"a", "c"}
    assert Plan.read(tmp_path / "plan.json") == given
    (tmp_path / "plan-0.json").unlink()
    # One that names a node which the job never had is somebody's mistake.
    elsewhere = GenerationMaker(tmp_path, run, ("a", "c"), EventLog(tmp_path / "events.jsonl", "a", 0, FakeClock()))
    with pytest.raises(RefusedError, match="it uses b, this run has a, c"):
        elsewhere.make(Proposal(0, 0, members("a", "c"), None, "start", "a"))


@pytest.mark.parametrize(("steps", "learnt"), [(60, True), (20, False)])
def test_a_plan_after_a_loss_predicts_with_what_the_steps_before_it_taught(
    tmp_path: Path, steps: int, learnt: bool
) -> None:
    run, both = run_of(mode="fixed", dp=2), topology("a", "b")
    plan = make_plan(run, run.spec(), both)
    before = write_generation(tmp_path, plan, run, both, truth(compute={"cpu": 2.0}), steps)
    maker = GenerationMaker(tmp_path, run, ("a", "b"), EventLog(tmp_path / "events.jsonl", "a", 0, FakeClock()))
    after = maker.make(Proposal(1, 0, members("a"), before, "b is lost", "me")).plan
    assert (after.profile is not None) == learnt
    if after.profile is not None:
        assert after.profile.compute == pytest.approx({"cpu": 2.0})
        assert after.predicted is not None
        usual = make_plan(run_of(), run.spec(), both.only(["a"])).predicted
        assert usual is not None
        assert after.predicted.step_time_s["total"] > 1.5 * usual.step_time_s["total"]


def test_other_software_is_told_once_in_an_attempt(tmp_path: Path) -> None:
    lines = [
        NodeEnvironment(
            attempt=attempt, node=node, time_s=1.0, software=SoftwareVersions(hpctrain=version, python="3.11.7")
        )
        for attempt, version in ((0, "0.1.0"), (1, "0.2.0"))
        for node in ("a", "b")
    ]
    (tmp_path / "environments.jsonl").write_text("".join(json.dumps(line.to_json()) + "\n" for line in lines))
    plan_on(tmp_path, run_of(), "a", "b", before=("a", "b"))
    events = [event for event in read_events(tmp_path / "events.jsonl") if event.kind == "environment_changed"]
    assert [event.reason for event in events] == ["changed since attempt 0: hpctrain 0.1.0 → 0.2.0"]
    previous = Generation(
        number=1, attempt=1, members=list(members("a", "b")), plan="plan-1.json", reason="start",
        store=StoreAddress(addr="127.0.0.1", port=1, node="a"),
    )  # fmt: skip
    maker = GenerationMaker(tmp_path, run_of(), ("a", "b"), EventLog(tmp_path / "events.jsonl", "a", 1, FakeClock()))
    maker.make(Proposal(2, 1, members("a", "b"), previous, "a worker was lost", "me")).announce()
    kinds = [event.kind for event in read_events(tmp_path / "events.jsonl")]
    assert kinds.count("environment_changed") == 1
