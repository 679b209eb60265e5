"""The time model by itself: host and device, messages that block, measured layers, other frameworks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.planner.cost.memory import PROCESS_BYTES, UNDO_BYTES, MemoryModel, RankRole
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.roofline import PassTime
from hpctrain.planner.cost.workload import ModelPart, workload_of
from hpctrain.planner.devices.constants import CPU_CONSTANTS, CUDA_CONSTANTS, HPCTRAIN_FRAMEWORK
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import make_tensor_parallel_groups
from hpctrain.planner.simulate.engine import StageDurations, simulate
from hpctrain.schedule.generate import make_schedule

seconds = st.floats(0, 100)


@given(seconds, seconds)
def test_a_host_that_runs_ahead_hides_behind_the_device_or_the_other_way_round(device, host):
    effort = PassTime(device, host, 1.0)
    assert effort.seconds(CPU_CONSTANTS) == pytest.approx(device + host + 1.0)
    ahead = effort.seconds(CUDA_CONSTANTS) - 1.0
    assert max(device, host) - 1e-9 <= ahead <= device + host + 1e-9


def test_sends_that_block_hold_up_the_sender():
    durations = StageDurations((0.1, 2.0), (0.1, 4.0), (0.5,), (0.5,))
    table = make_schedule("1f1b", 2, 2, 8)
    assert simulate(table, durations).makespan == pytest.approx(0.1 + 0.5 + 8 * 6.0 + 0.5 + 0.1)
    # The last rank never waits: it now stands still for each of its gradients but the last.
    blocked = simulate(table, durations._replace(blocking=True)).makespan
    assert blocked == pytest.approx(simulate(table, durations).makespan + 7 * 0.5)


def model(topology, run, kind="cpu", **fields):
    asked = run(**fields)
    work, _ = workload_of(asked, asked.spec())
    pool = make_device_pool(asked, topology([1.0, 1.0], kind=kind))
    return CostModel(work, pool.links), make_tensor_parallel_groups(pool, 1)[0]


def test_narrow_blocks_cost_more_per_flop_on_a_gpu_only(topology, run):
    wide = {"layers": 4, "dim": 2048, "heads": 8, "vocab": 512}
    for kind, constants in (("cpu", CPU_CONSTANTS), ("cuda", CUDA_CONSTANTS)):
        cost, unit = model(topology, run, kind=kind, dims=wide)
        even = CostModel(cost.work, cost.links, {kind: replace(constants, half_width=0.0)})
        assert (cost.module_times(unit, 8).block > even.module_times(unit, 8).block) == (kind == "cuda")


def test_the_head_reaches_the_speed_of_large_products_and_blocks_a_share_of_it(topology, run):
    cost, unit = model(topology, run, kind="cuda")
    worse = {"cuda": replace(CUDA_CONSTANTS, efficiency=CUDA_CONSTANTS.efficiency / 2)}
    less_efficient = CostModel(cost.work, cost.links, worse).module_times(unit, 8)
    assert less_efficient.block > cost.module_times(unit, 8).block
    assert less_efficient.head == cost.module_times(unit, 8).head


def test_a_framework_says_what_stays_in_memory(topology, run):
    cost, _ = model(topology, run)
    half = replace(
        HPCTRAIN_FRAMEWORK, weight_bytes=2, gradient_bytes=2, state_bytes=12, checkpoint_bytes=0, process_bytes=0.0
    )
    role = RankRole("cpu", "1f1b", 1, 0, 1, 1, 1, 1, 2, 4)
    ours = cost.memory.need(role, (6,))
    theirs = MemoryModel(replace(cost.work, framework=half)).need(role, (6,))
    parameters = cost.work.parameters(ModelPart(6, True, True), 1)
    assert ours - theirs == pytest.approx(PROCESS_BYTES["cpu"] + (28 - 16) * parameters)


@pytest.mark.parametrize(
    ("kind", "shards", "mode", "numbers"),
    [("cpu", 1, "none", 4), ("cpu", 2, "none", 2), ("cpu", 1, "topk", 4 + 8), ("cpu", 1, "local_steps", None),
     ("cuda", 1, "none", None)],
)  # fmt: skip
def test_state_that_outlives_a_cpu_worker_takes_reduced_gradients_and_two_codec_states(
    topology, run, kind, shards, mode, numbers
):
    """In addition to parameters and moments, which it holds anyway."""

    def need(memory: str) -> float:
        cost, _ = model(topology, run, kind=kind, recovery={"memory": memory}, compression={"mode": mode})
        return cost.memory.need(RankRole(kind, "1f1b", 1, 0, 1, 2, 1, shards, 2, 4), (6,))

    cost, _ = model(topology, run, kind=kind)
    parameters = cost.work.parameters(ModelPart(6, True, True), 1)
    more = 0 if numbers is None else numbers * parameters + UNDO_BYTES
    assert need("auto") - need("off") == pytest.approx(more)


@pytest.mark.parametrize(
    ("shards", "mode", "numbers"),
    [(2, "none", 4 * 12 / 2), (2, "int8", 4 * (12 / 2 + 4)), (1, "none", 0), (1, "int8", 0)],
)
def test_snapshots_of_a_state_that_is_sharded_over_all_replicas_take_four_states(topology, run, shards, mode, numbers):
    def need(every: str | int) -> float:
        compression = {"mode": mode}
        cost, _ = model(topology, run, kind="cpu", recovery={"snapshot_every": every}, compression=compression)
        return cost.memory.need(RankRole("cpu", "1f1b", 1, 0, 1, 2, 1, shards, 2, 4), (6,))

    cost, _ = model(topology, run, kind="cpu")
    parameters = cost.work.parameters(ModelPart(6, True, True), 1)
    assert need(5) - need("off") == pytest.approx(numbers * parameters)


@pytest.mark.parametrize(("kind", "shards", "numbers"), [("cpu", 1, 2 * 12), ("cpu", 2, 4 * 12 / 2), ("cuda", 1, 0)])
def test_snapshots_without_segments_take_two_states_and_two_of_another_rank(topology, run, kind, shards, numbers):
    def need(**recovery: str | int) -> float:
        cost, _ = model(topology, run, kind=kind, recovery=recovery)
        return cost.memory.need(RankRole(kind, "1f1b", 1, 0, 1, 2, 1, shards, 2, 4), (6,))

    cost, _ = model(topology, run, kind=kind)
    parameters = cost.work.parameters(ModelPart(6, True, True), 1)
    assert need(memory="snapshots", snapshot_every=5) - need(memory="off") == pytest.approx(numbers * parameters)
