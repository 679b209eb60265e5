"""The memory of a node in which the state of its workers outlives them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_clock import FakeClock

from hpctrain.agent.event_log import EventLog
from hpctrain.agent.generation_store import Proposal
from hpctrain.base.errors import NoProgressError
from hpctrain.checkpoint.memory.segment import (
    CONTROL,
    AdamSettings,
    SegmentIndex,
    create,
    encode_index,
    layout_header,
)
from hpctrain.node.generation_maker import GenerationMaker
from hpctrain.node.state_segments import StateSegments
from hpctrain.records.history.generation import GENERATIONS, Generation, Member, StoreAddress, record_file
from hpctrain.records.history.memory_state import HeldState, MemorySource, StateHolder
from hpctrain.records.plan.plan import Plan, Replica, Stage
from hpctrain.records.run.run import Run


def plan_on(*devices: str) -> Plan:
    replicas = [Replica(sequences=2, micro_batch=1, micro_batches=2, devices=[[device]]) for device in devices]
    return Plan(pp=1, dp=len(devices), tp=1, stages=[Stage(layers=(0, 2))], replicas=replicas, ranks=list(devices))


def record(number: int, memory: MemorySource | None = None) -> Generation:
    store = StoreAddress(addr="127.0.0.1", port=1, node="a")
    return Generation(number=number, attempt=0, members=[], plan="p.json", store=store, memory=memory, reason="test")


def fill(descriptor: int, rank: int, step: int = 7, generation: int = 0) -> None:
    """What a worker leaves: a state of that step."""
    adam = AdamSettings(betas=(0.9, 0.95), eps=1e-8, fused=True)
    index = encode_index(SegmentIndex(optimizer=adam, bucket_bytes=1 << 14, entries=[]))
    create(descriptor, layout_header(generation, rank, "ab" * 32, index, 64, 3 << 14), index)
    os.pwrite(descriptor, (step + 1).to_bytes(8, "little"), CONTROL)


def source(continued: Sequence[int], *holders: tuple[int, str]) -> MemorySource:
    return MemorySource(
        generation=0, plan="p.json", step=7, continued=list(continued),
        holders=[StateHolder(rank=rank, node=node) for rank, node in holders],
    )  # fmt: skip


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


PLAN = plan_on("a:cpu0", "a:cpu1", "b:cpu0")


@pytest.fixture
def segments() -> Iterator[StateSegments]:
    made = StateSegments("a")
    yield made
    made.close()


def test_each_cpu_worker_gets_memory_of_its_own(segments: StateSegments) -> None:
    orders = segments.orders(record(0), PLAN, [0, 1])
    assert set(orders) == {0, 1}
    assert orders[0].live != orders[1].live
    assert all(order.source is None and order.segments == () for order in orders.values())
    assert segments.held() == ()
    fill(orders[0].live, 0)
    assert [(state.rank, state.step) for state in segments.held()] == [(0, 7)]


def test_a_gpu_worker_gets_none(segments: StateSegments) -> None:
    assert segments.orders(record(0), plan_on("a:cuda0"), [0])[0].live is None


def test_on_the_same_plan_a_worker_gets_the_memory_of_the_one_before(segments: StateSegments) -> None:
    before = segments.orders(record(0), PLAN, [0, 1])
    for rank in (0, 1):
        fill(before[rank].live, rank)
    after = segments.orders(record(1, source((0, 1, 2), (0, "a"), (1, "a"), (2, "b"))), PLAN, [0, 1])
    assert [after[rank].live for rank in (0, 1)] == [before[rank].live for rank in (0, 1)]
    assert [state.rank for state in segments.held()] == [0, 1]


def test_a_worker_gets_the_memory_of_the_rank_whose_place_it_takes(segments: StateSegments) -> None:
    before = segments.orders(record(0), PLAN, [0, 1])
    for rank in (0, 1):
        fill(before[rank].live, rank)
    one = plan_on("a:cpu1")
    after = segments.orders(record(1, source((1,), (0, "a"), (1, "a"))), one, [0])
    assert after[0].live == before[1].live
    assert not is_open(before[0].live)
    # It keeps the number that it was filled with, by which the next generation finds it.
    assert [state.rank for state in segments.held()] == [1]
    again = segments.orders(record(2, source((1,), (1, "a"))), one, [0])
    assert again[0].live == before[1].live


def test_on_another_plan_new_memory_is_filled_from_the_old_which_stays_until_all_are_ready(
    segments: StateSegments,
) -> None:
    before = segments.orders(record(0), PLAN, [0, 1])
    for rank in (0, 1):
        fill(before[rank].live, rank)
    old = [before[rank].live for rank in (0, 1)]
    after = segments.orders(record(1, source((), (0, "a"), (1, "a"))), plan_on("a:cpu0", "a:cpu1"), [0, 1])
    assert sorted(fd for order in after.values() for fd in order.segments) == sorted(old)
    assert not {order.live for order in after.values()} & set(old)
    segments.ready(0)
    assert all(is_open(descriptor) for descriptor in old)
    # A fault now: the old state is there still, and the new one is not yet.
    assert [state.rank for state in segments.held()] == [0, 1]
    segments.ready(1)
    assert not any(is_open(descriptor) for descriptor in old)


def sharded_on(*devices: str) -> Plan:
    return plan_on(*devices).model_copy(update={"zero": 1})


def test_each_worker_gets_memory_for_its_snapshots_and_for_those_of_a_neighbour() -> None:
    segments = StateSegments("a", {})
    order = segments.orders(record(0), sharded_on("a:cpu0", "b:cpu0", "c:cpu0"), [0])[0]
    assert [memory.rank for memory in order.snapshots] == [0, 2]
    descriptors = {order.live, *(descriptor for memory in order.snapshots for descriptor in memory.descriptors)}
    assert len(descriptors) == 5
    assert set(order.descriptors) == descriptors
    # With replicas another node has the state anyway, and on one node there is no neighbour.
    assert segments.orders(record(1), plan_on("a:cpu0", "b:cpu0"), [0])[0].snapshots == ()
    assert segments.orders(record(2), sharded_on("a:cpu0", "a:cpu1"), [0, 1])[0].snapshots == ()
    segments.close()
    assert StateSegments("a").orders(record(0), sharded_on("a:cpu0", "b:cpu0"), [0])[0].snapshots == ()


@pytest.mark.parametrize(("device", "keeps_live"), [("cpu0", False), ("cuda0", True)])
def test_where_no_segment_outlives_a_worker_each_makes_snapshots(device: str, keeps_live: bool) -> None:
    segments = StateSegments("a", {}, keeps_live)
    order = segments.orders(record(0), plan_on(f"a:{device}", f"b:{device}"), [0])[0]
    assert order.live is None
    # Its own only: with replicas another node has the state, too.
    assert [memory.rank for memory in order.snapshots] == [0]
    order = segments.orders(record(1), plan_on(f"a:{device}"), [0])[0]
    for descriptor, step in zip(order.snapshots[0].descriptors, (7, 6), strict=True):
        fill(descriptor, 0, step)
    assert [(state.kind, state.step) for state in segments.held()] == [("snapshot", 7), ("snapshot", 6)]
    holders = [StateHolder(rank=0, node="a", kind="snapshot")]
    memory = MemorySource(generation=0, plan="p.json", step=7, holders=holders)
    again = segments.orders(record(2, memory), plan_on(f"a:{device}"), [0])[0]
    assert again.segments == order.snapshots[0].descriptors[:1]
    segments.close()
    without = StateSegments("a", None, keeps_live)
    assert without.orders(record(0), plan_on(f"a:{device}"), [0])[0].snapshots == ()


def test_a_generation_starts_from_the_snapshots_of_one_step() -> None:
    segments = StateSegments("a", {})
    order = segments.orders(record(0), sharded_on("a:cpu0", "b:cpu0"), [0])[0]
    own, guest = (memory.descriptors for memory in order.snapshots)
    fill(order.live, 0, step=9)
    for descriptor, rank, step in ((own[0], 0, 8), (own[1], 0, 7), (guest[0], 1, 8), (guest[1], 1, 7)):
        fill(descriptor, rank, step)
    assert sorted((state.kind, state.rank, state.step) for state in segments.held()) == [
        ("guest", 1, 7), ("guest", 1, 8), ("live", 0, 9), ("snapshot", 0, 7), ("snapshot", 0, 8),
    ]  # fmt: skip
    holders = [StateHolder(rank=0, node="a", kind="snapshot"), StateHolder(rank=1, node="a", kind="guest")]
    memory = source((), (0, "a")).model_copy(update={"step": 8, "holders": holders})
    after = segments.orders(record(1, memory), plan_on("a:cpu0"), [0])[0]
    assert sorted(after.segments) == sorted((own[0], guest[0]))
    assert not is_open(own[1]) or own[1] == after.live
    segments.close()


def test_a_worker_that_continues_on_its_memory_keeps_its_snapshots() -> None:
    segments = StateSegments("a", {})
    plan = sharded_on("a:cpu0", "b:cpu0")
    before = segments.orders(record(0), plan, [0])[0]
    fill(before.live, 0)
    after = segments.orders(record(1, source((0, 1), (0, "a"), (1, "b"))), plan, [0])[0]
    assert (after.live, after.snapshots) == (before.live, before.snapshots)
    segments.close()


def test_what_no_generation_starts_from_is_given_up(segments: StateSegments) -> None:
    before = segments.orders(record(0), PLAN, [0, 1])
    fill(before[0].live, 0)
    fill(before[1].live, 1)
    after = segments.orders(record(1), PLAN, [0])
    assert after[0].segments == ()
    # Its number may be that of the new memory now.
    assert not is_open(before[1].live) or before[1].live == after[0].live
    assert segments.held() == ()


def test_a_node_of_which_nothing_is_read_passes_nothing_on(segments: StateSegments) -> None:
    before = segments.orders(record(0), PLAN, [0])
    fill(before[0].live, 0)
    after = segments.orders(record(1, source((), (0, "b"))), PLAN, [0])
    assert after[0].segments == ()


RUN = Run.model_validate(
    {"steps": 9, "model": {"dims": {"layers": 2, "dim": 32, "heads": 4, "vocab": 64}}, "batch": {"global": 4},
     "data": {"train": ["d"], "seq_len": 32}}
)  # fmt: skip


def proposed(
    folder: Path, saved: int | None, published: bool = True, left: int | None = 7, **before: object
) -> Generation:
    """The record of a generation after one whose two replicas left the state of step `left`; None: no state.

    Args:
        before: fields of the record of the generation before.
    """
    plan = plan_on("a:cpu0", "b:cpu0")
    (folder / GENERATIONS).mkdir(exist_ok=True)
    plan.write(folder / "generations" / "p.json")
    previous = record(0).model_copy(update={"plan": "generations/p.json", **before})
    if published:
        previous.write(record_file(folder / GENERATIONS, 0))
    if saved is not None:
        (folder / "checkpoints" / f"step-{saved:08}").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / f"step-{saved:08}" / "manifest.json").touch()
    members = tuple(Member(node=node, incarnation=node, addr="127.0.0.1", store_port=1) for node in "ab")
    held = {
        node: [HeldState(generation=0, plan_sha256=plan.sha256(), rank=rank, step=left, norm_step=left, size_bytes=1)]
        for rank, node in enumerate("ab")
        if left is not None
    }
    maker = GenerationMaker(folder, RUN, ("a", "b"), EventLog(folder / "events.jsonl", "a", 0, FakeClock()))
    return maker.make(Proposal(1, 0, members, previous, "a worker died", "me", held)).record


def test_a_generation_starts_from_memory_and_reads_no_checkpoint(tmp_path: Path) -> None:
    made = proposed(tmp_path, saved=5)  # which could not be verified
    assert made.memory is not None
    assert (made.memory.generation, made.memory.step, made.memory.continued) == (0, 7, [0, 1])
    assert made.restore == "checkpoints/step-00000005"  # by which progress is counted
    assert (tmp_path / "checkpoints" / "step-00000005").exists()


def test_the_record_of_the_generation_before_need_not_be_published(tmp_path: Path) -> None:
    made = proposed(tmp_path, saved=None, published=False)
    assert made.memory is not None
    assert (made.memory.plan, made.memory.step) == ("generations/p.json", 7)


def test_a_later_step_in_memory_is_progress_and_the_same_one_is_none(tmp_path: Path) -> None:
    checkpoint = "checkpoints/step-00000005"
    made = proposed(tmp_path, saved=5, restore=checkpoint, failures=3, newest_start=6)
    assert (made.failures, made.newest_start) == (1, 7)
    again = proposed(tmp_path, saved=5, restore=checkpoint, failures=made.failures, newest_start=made.newest_start)
    assert (again.failures, again.newest_start) == (2, 7)
    saved = proposed(tmp_path, saved=7, restore=checkpoint, failures=2, newest_start=7)
    assert saved.failures == 1


def test_a_crash_at_the_same_step_spends_the_retries_though_each_time_memory_is_later_than_the_start(
    tmp_path: Path,
) -> None:
    """Step 8 kills the workers, and the state of step 7 in memory cannot be loaded: every other generation starts from
    the seed."""
    failures, newest_start = 0, 0
    for left in (7, None, 7, None):
        made = proposed(tmp_path, saved=None, left=left, failures=failures, newest_start=newest_start)
        failures, newest_start = made.failures, made.newest_start
        if failures == RUN.recovery.retries:
            break
    with pytest.raises(NoProgressError, match=r"4 failures in a row without a new checkpoint .* last: a worker died"):
        proposed(tmp_path, saved=None, failures=failures, newest_start=newest_start)


def test_one_worker_of_a_new_plan_reads_all_the_memory_of_a_large_node(segments: StateSegments) -> None:
    count = 70
    plan = plan_on(*(f"a:cpu{index}" for index in range(count)))
    before = segments.orders(record(0), plan, range(count))
    for rank, order in before.items():
        assert order.live is not None
        fill(order.live, rank)
    after = segments.orders(record(1, source((), *((rank, "a") for rank in range(count)))), plan_on("a:cpu0"), [0])
    assert sorted(after[0].segments) == sorted(order.live for order in before.values() if order.live is not None)


def test_a_checkpoint_of_a_later_step_than_the_memory_is_taken(tmp_path: Path) -> None:
    made = proposed(tmp_path, saved=8)
    assert made.memory is None
    assert made.restore is None  # it was damaged
