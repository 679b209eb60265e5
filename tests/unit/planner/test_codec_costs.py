"""What sums of gradients cost with each codec: memory, bytes, rounds and seconds."""

from __future__ import annotations

import pytest

from hpctrain.planner.cost.collectives import StageGradients, all_reduce_time
from hpctrain.planner.cost.memory import MemoryModel, RankRole
from hpctrain.planner.cost.shard_collectives import ShardCollectives
from hpctrain.planner.cost.workload import ModelPart, workload_of
from hpctrain.planner.devices.constants import COST_CONSTANTS, CPU_CONSTANTS
from hpctrain.planner.devices.placement_links import PlacementLinks
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import Placement, make_tensor_parallel_groups
from hpctrain.records.plan.compression import BUCKET_BYTES, Bf16, NoCompression, Tagc, TopK
from hpctrain.records.plan.gradient_codec import sparse_bytes
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.local_sgd import LocalSteps
from hpctrain.records.plan.low_rank import PowerSgd
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.rotated import RotatedIntegers
from hpctrain.records.topology.topology import CodecSeconds

pytestmark = pytest.mark.slow
LARGE = {"layers": 8, "dim": 512, "heads": 8}


def test_what_is_kept_counts_as_memory_once_more_while_a_checkpoint_is_written(run):
    def need(dp: int, shards: int = 1, **compression) -> float:
        asked = run(dims=LARGE, compression=compression)
        work, _ = workload_of(asked, asked.spec())
        return MemoryModel(work).need(RankRole("cpu", "1f1b", 1, 0, 1, dp, 1, shards, 1, 1), (8,))

    numbers = run(dims=LARGE).spec().parameters()
    assert need(2, mode="topk") - need(2, mode="none") == 8 * numbers
    assert need(2, mode="topk", residual="bf16") - need(2, mode="none") == 4 * numbers
    assert need(2, mode="power_sgd") - need(2, mode="none") == pytest.approx(8 * numbers * (1 + 12 / 512))
    assert need(2, mode="bf16") == need(2, mode="none")
    assert need(2, mode="int4") - need(2, mode="none") == 8 * numbers
    assert need(2, mode="rotated_int3") == need(2, mode="none"), "no residual"
    assert need(1, mode="topk") == need(1, mode="none")
    assert need(4, 2, mode="topk") - need(4, 2, mode="none") == 4 * numbers
    for mode in ("topk", "int8"):
        assert need(2, 2, mode=mode) - need(2, 2, mode="none") == 8 * numbers, "whole, though the state is sharded"


def test_sums_of_a_sharded_state_take_their_bytes_and_their_processor_seconds(plan, topology):
    """At levels 2 and 3, a part of these seconds passes beside the backward (test_planner_overlap.py)."""
    each = CodecSeconds(bf16=1e-8, quantized=1e-8, topk=1e-8, power_sgd=1e-8)
    there = topology(default=(0.0, 1e-8), codec_s=each)

    parallel = {"mode": "fixed", "dp": 2, "zero": 1, "micro_batch": 1}

    def made(mode: str) -> Plan:
        return plan(there, compression={"mode": mode}, parallel=parallel, dims=LARGE, rows=4)

    exact = made("none")
    for mode, each_bytes, share in (
        ("bf16", 2, 1), ("int8", 1 + 1 / 64, Quantized.reduce_scatter_share), ("topk", sparse_bytes(0.05, "bf16"), 1),
    ):  # fmt: skip
        saved = (4 - each_bytes) * (1e-8 / 2 + CPU_CONSTANTS.reduce_scatter.passes / 1e10) - share * 1e-8
        assert exact.predicted.step_time_s["total"] - made(mode).predicted.step_time_s["total"] == pytest.approx(
            25_829_888 * saved, rel=2e-3
        )


def test_bytes_and_rounds_of_each_way(topology, run):
    pool = make_device_pool(run(), topology((1, 1, 1, 1), default=(1e-3, 1e-8)))
    placement = Placement((unit,) for unit in make_tensor_parallel_groups(pool, 1))
    placement_links = PlacementLinks(placement, pool.links)
    each = CodecSeconds(bf16=1e-9, quantized=3e-9, topk=4e-9, power_sgd=2e-9, rotated=6e-9)
    numbers = 1_000_000

    def found(codec):
        (rings,), (pairs,) = (placement_links.replicate_ring_groups(1, pairs) for pairs in (False, True))
        gradients = StageGradients(numbers, 4, 1024, 1e-10, each, 1e-11)
        return all_reduce_time(codec, rings, pairs, gradients, BUCKET_BYTES)

    ring = 2 * 3 / 4 * numbers
    for codec, sent, turns, processor in (
        (Bf16(mode="bf16"), 2 * ring, 1, 1e-3),
        (Quantized(mode="int4"), ring * (0.5 + 1 / 64), 1, 3e-3),
        (RotatedIntegers(mode="rotated_int3"), ring * (3 / 8 + 1 / 128), 1, 6e-3),
        (PowerSgd(mode="power_sgd"), 2 * ring * 8 / 1024, 2, 2e-3),
        # Of rank 64, not of rank 4, which is measured: 10 FLOP more for each of 60 columns.
        (PowerSgd(mode="power_sgd", rank="auto"), ring / 4, 2, 2e-3 + 600e-5),
        (PowerSgd(mode="power_sgd", remainder="int2"), ring * (16 / 1024 + 1 / 4 + 1 / 128), 2, 8e-3),
        (TopK(mode="topk", density=0.07), ring * 0.21, 3, 5e-3),
    ):
        one = found(codec)
        assert one.sent_bytes == pytest.approx(sent)
        assert one.wire_s == pytest.approx(turns * 6 * 1e-3 + 1e-8 * sent)
        assert one.processor_s == pytest.approx(processor)
    (rings,) = placement_links.replicate_ring_groups(1, False)
    exact = all_reduce_time(NoCompression(), rings, rings, StageGradients(numbers, 4, 1024, 1e-10, None), BUCKET_BYTES)
    assert (exact.sent_bytes, exact.wire_s) == (4 * ring, pytest.approx(6e-3 + 4e-8 * ring))


@pytest.mark.parametrize(
    ("codec", "all_to_all", "rings"),
    [
        (Bf16(mode="bf16"), 2, 2),
        (Quantized(mode="int8"), 1 + 1 / 64, 1 + 1 / 64),
        (RotatedIntegers(mode="rotated_int2"), 1 / 4 + 1 / 128, 1 / 4 + 1 / 128),
        (TopK(mode="topk", density=0.07), 0.21, 0.21),
        (Tagc(mode="tagc", ratio=10), 1 / 8, 0.4 * 2 + 1 / 8),  # positions; numbers, both ways, and positions
        (Tagc(mode="tagc", ratio=10, index="1bit"), 0, 2 * (0.4 + 1 / 8)),
        # The first factor is all-reduced.
        (PowerSgd(mode="power_sgd"), 8 / 1024, 3 * 8 / 1024),
        (PowerSgd(mode="power_sgd", remainder="int2"), 8 / 1024 + 1 / 4 + 1 / 128, 3 * 8 / 1024 + 1 / 4 + 1 / 128),
        (LocalSteps(mode="local_steps", every=1), 0, 2 * 4),
        (LocalSteps(mode="local_steps", every=1, values="int8"), 1 + 1 / 64, 1 + 1 / 64),
    ],
)
def test_messages_to_everyone_crowd_a_card_that_a_ring_crosses_once(codec, all_to_all, rings, topology, run):
    """Bytes of a message for each number that all-to-alls carry, and rings; four devices on each of two nodes. In an
    all-to-all, each device sends a half of them to the other node; in a ring, one device of a node 7/8."""
    pool = make_device_pool(run(), topology((1, 1), devices=4, default=(0.0, 1e-5)))
    links = PlacementLinks(Placement((unit,) for unit in make_tensor_parallel_groups(pool, 1)), pool.links)
    gradients = StageGradients(1e6, 4, 1024, 0.0, CodecSeconds(bf16=1, quantized=1, topk=1, power_sgd=1, rotated=1))
    (ring,), (pairs,) = (links.replicate_ring_groups(1, pairs) for pairs in (False, True))
    wire_s = all_reduce_time(codec, ring, pairs, gradients, BUCKET_BYTES).wire_s
    assert wire_s == pytest.approx(1e6 * 1e-5 * (4 * all_to_all / 2 + rings * 7 / 8), rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "mode", "load"), [("cpu", "none", 4 / 2), ("cuda", "none", 7 / 8), ("cuda", "bf16", 4 / 2 / 2)]
)
def test_reduce_scatters_to_owners_crowd_a_card(kind, mode, load, topology, run):
    """Share of the gradients' bytes in fp32 that one of two nodes sends: NCCL's own reduce-scatter is a ring."""
    pool = make_device_pool(run(), topology((1, 1), devices=4, default=(0.0, 1e-6), kind=kind))
    links = PlacementLinks(Placement((unit,) for unit in make_tensor_parallel_groups(pool, 1)), pool.links)
    wanted = run(compression={"mode": mode}, dims=LARGE)
    work, part = workload_of(wanted, wanted.spec())[0], ModelPart(8, first=True, last=True)
    (times,) = ShardCollectives(work, COST_CONSTANTS).times(links, [part], [0], 8)
    size_s = 4 * work.parameters(part, 1) * 1e-6
    assert times.scatter == pytest.approx(load * size_s, rel=1e-3)
    assert times.gather == pytest.approx(7 / 8 * size_s, rel=1e-3)
