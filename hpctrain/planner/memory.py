"""How much memory a device needs, and how much of it a plan may use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hpctrain.planner.workload import Share, Workload
from hpctrain.schedule.generate import make_schedule

USABLE = 0.9
"""Share of a device's memory that a plan may fill (the paper, section 3.4); the rest is the allocator's."""
STATE_BYTES = 16
"""Per parameter: fp32 weight and gradient and the two moments of AdamW."""
BUCKET_BYTES = 4
"""Per parameter with several replicas: the flat buffer that gradients are summed in."""
CAST_BYTES = 2
"""Per parameter in bf16: the cast copy of a weight that autocast keeps until the backward pass."""
PROCESS_BYTES = {"cpu": 350e6, "cuda": 1.0e9}
"""Before any tensor. CPU: resident memory of Python with torch, its pipelining and gloo, measured 317 MB (torch 2.13),
and a little for the data. CUDA: context, kernels and NCCL buffers, an assumption."""


@lru_cache(maxsize=4096)
def live_micro_batches(schedule: str, pp: int, stages: int, micro_batches: int) -> tuple[int, ...]:
    """The most micro-batches whose activations each stage keeps at once, counted in the action table."""
    peak, live = [0] * stages, [0] * stages
    for row in make_schedule(schedule, pp, stages, micro_batches).ranks:
        for action in row:
            live[action.stage] += 1 if action.kind == "F" else -1
            peak[action.stage] = max(peak[action.stage], live[action.stage])
    return tuple(peak)


def device_bytes(
    work: Workload, kind: str, tp: int, dp: int, micro_batch: int, shares: Sequence[Share], live: Sequence[int]
) -> float:
    """Peak of one device that holds these shares of the model.

    Args:
        live: micro-batches that each share keeps at once.
    """
    per_parameter = STATE_BYTES + (BUCKET_BYTES if dp > 1 else 0) + (CAST_BYTES if work.precision == "bf16" else 0)
    block = work.block_bytes(micro_batch, tp)
    boundary = work.boundary_bytes(micro_batch)
    total = PROCESS_BYTES[kind]
    for share, kept in zip(shares, live, strict=True):
        total += per_parameter * work.parameters(share, tp)
        total += kept * (share.blocks * block + 2 * boundary)  # what came in, and what is to be sent on
        if share.last:
            total += kept * work.spec.logits_bytes(micro_batch, work.seq_len, work.head_shards(tp))
    return total + block  # gradients inside the block that is at work
