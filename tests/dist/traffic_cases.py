"""Bytes of tensor parallelism: the worker's counter beside what gloo itself reports to torch's profiler.

python traffic_cases.py all 2 FOLDER
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import HALF, ODD, PLANS, SEQ, SPEC, WHOLE, batch, make_plan, my_rows, open_pipeline
from gloo_calls import ELEMENT_BYTES, gloo_calls
from processes import launch, process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.profiler import ProfilerActivity, profile

from hpctrain.parallel.gradients import local_gradients
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.figures.collective_counter import CollectiveCounter

TP2 = make_plan(1, 1, 2, WHOLE, [(4, 2)])
STEPS: dict[str, tuple[Plan, DecoderSpec]] = {
    "vocabulary 64": (TP2, SPEC),
    "vocabulary 256": (TP2, SPEC.model_copy(update={"vocab": 256})),
    "vocabulary 67, whole": (TP2, ODD),
    "two stages": (make_plan(1, 1, 2, HALF, [(2, 4)], "interleaved_1f1b"), SPEC),
    "full recomputation": PLANS["tp2 full"],
    "selective recomputation": PLANS["tp2 selective"],
    "sequence": PLANS["tp2 sequence"],
    "sequence, vocabulary 67": PLANS["tp2 sequence, odd vocabulary"],
    "sequence, recomputed": PLANS["tp2 sequence, full and selective"],
    "tied, in bf16": PLANS["tp2 tied, in bf16"],
    "sequence, recomputed, in bf16": PLANS["tp2 sequence, full and selective, in bf16"],
}

RING = {"all_reduce": 1.0, "all_gather": 1.0, "reduce_scatter": 0.5, "all_to_all": 0.5}
"""Bytes that each of two ranks sends, as a share of the collective's input."""


def step_bytes(plan: Plan, spec: DecoderSpec) -> int:
    """By hand, for two ranks: all-reduces of activations (two a block forward, two backward; with a split vocabulary
    one for the embedding and one for the gradient at the head) and three numbers a token for the loss on the shards.

    Recomputation repeats the all-reduce after the attention; nothing needs the one after the SwiGLU, the block's last.
    With sequence parallelism, each all-reduce is half an all-gather, half a reduce-scatter; the embedding's and the
    head's come in both directions; recomputation repeats all but the last reduce-scatter; and the norms' gradients
    are summed once a step. Between nodes in bf16, blocks and the head send half the bytes."""
    replica = plan.replicas[0]
    tokens = replica.micro_batch * SEQ
    split = spec.vocabulary % plan.tp == 0
    repeated = 1.5 if plan.sequence_parallel else 1.0
    recomputed = sum(stage.layers[1] - stage.layers[0] for stage in plan.stages if stage.recompute != "none")
    ends = 2.0 if split else 1.0 if plan.sequence_parallel else 0.0
    summed, exact = 4 * spec.layers + repeated * recomputed, ends
    if plan.tensor_parallel_sums == "bf16":
        assert split
        summed, exact = (summed + ends / 2) / 2, ends / 2
    floats = (summed + exact) * tokens * spec.dim + (3 * tokens if split else 0)
    norms = (2 * spec.layers + 1) * spec.dim if plan.sequence_parallel else 0
    return int(4 * (floats * replica.micro_batches + norms))


def reported_bytes(trace: profile) -> int:
    """What gloo says of itself: its collectives with the shapes and types of their inputs."""
    inputs = [
        (call.kind, ELEMENT_BYTES[type_], math.prod(shape))
        for call in gloo_calls(trace)
        for shape, type_ in zip(call.shapes, call.types, strict=True)
        if shape
    ]
    return int(sum(RING[kind] * number_bytes * numbers for kind, number_bytes, numbers in inputs))


def measured(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes by the counter and by gloo's own report; the second rank, whose results nobody reads, only takes part."""
    if dist.get_rank() > 0:
        work()
        return 0, 0
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace, CollectiveCounter() as counter:
        work()
    return counter.sent_bytes, reported_bytes(trace)


def of_a_step(plan: Plan, spec: DecoderSpec, rank: int) -> tuple[int, int]:
    pipeline, coordinate, _ = open_pipeline(plan, spec, rank)
    rows = my_rows(plan, coordinate, batch(spec, 0))

    def work() -> None:
        pipeline.step(*rows)
        local_gradients([parameter for _, parameter in pipeline.parameters()])

    return measured(work)


def collectives() -> dict[str, tuple[Callable[[], object], int]]:
    """Work on DTensors of 128 bytes over two ranks, and the bytes each rank sends for it."""
    mesh = init_device_mesh("cpu", (2,))

    def spread(*placements: Any) -> DTensor:
        return DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)

    return {
        "gather": (lambda: spread(Shard(0)).full_tensor(), 64),
        "reduce": (lambda: spread(Partial()).redistribute(mesh, [Replicate()]), 64),
        "scatter": (lambda: spread(Partial()).redistribute(mesh, [Shard(0)]), 32),
        "within an operation": (lambda: F.softmax(spread(Shard(0)), dim=0), 64),
    }


def all_bytes(folder: Path, rank: int, world: int) -> dict[str, Any]:
    results = {}
    with process_group(folder, rank, world):
        for name, (plan, spec) in STEPS.items():
            counted, reported = of_a_step(plan, spec, rank)
            results[name] = {"counted": counted, "reported": reported, "expected": step_bytes(plan, spec)}
        for name, (work, expected) in collectives().items():
            dist.barrier()
            counted, reported = measured(work)
            results[name] = {"counted": counted, "reported": reported, "expected": expected}
    return results


if __name__ == "__main__":
    launch({"all": all_bytes}[sys.argv[1]], int(sys.argv[2]), sys.argv[3])
