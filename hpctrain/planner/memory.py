"""How much memory a device needs, and how much of it a plan may use."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hpctrain.planner.workload import Share, Workload
from hpctrain.schedule.generate import make_schedule

USABLE = 0.9
"""Share of a device's memory that a plan may fill (the paper, section 3.4); the rest is the allocator's."""
STATE_BYTES = 16
"""Per parameter: fp32 weight and gradient and the two moments of AdamW."""
CHECKPOINT_BYTES = 12
"""Per parameter while a checkpoint is written beside the training: a copy of weight and moments."""
BUCKET_BYTES = 32 * 2**20
"""With several replicas: the flat buffer that gradients are summed in, piece by piece."""
CAST_BYTES = 2
"""Per parameter in bf16: the cast copy of a weight that autocast keeps until the backward pass."""
PROCESS_BYTES = {"cpu": 430e6, "cuda": 1.0e9}
"""Before any tensor. CPU: Python with torch, its pipelining and gloo, measured 317 MB (torch 2.13), and what a worker's
resident peak held beside its tensors, 40 to 110 MB. CUDA: context, kernels and NCCL buffers, an assumption."""


@lru_cache(maxsize=4096)
def live_micro_batches(schedule: str, pp: int, stages: int, micro_batches: int) -> tuple[int, ...]:
    """The most micro-batches whose activations each stage keeps at once, counted in the action table."""
    peak, live = [0] * stages, [0] * stages
    for row in make_schedule(schedule, pp, stages, micro_batches).ranks:
        for action in row:
            live[action.stage] += 1 if action.kind == "F" else -1
            peak[action.stage] = max(peak[action.stage], live[action.stage])
    return tuple(peak)


class RankRole(NamedTuple):
    """Where a device stands in a plan: everything but the blocks that decides what it keeps."""

    kind: str
    schedule: str
    pp: int
    rank: int
    stages: int
    dp: int
    tp: int
    micro_batch: int
    micro_batches: int


class MemoryModel:
    """Answers with bytes; remembers what it computed."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self._needs: dict[tuple[RankRole, tuple[int, ...]], float] = {}
        self._most: dict[tuple[RankRole, float], int] = {}

    def need(self, role: RankRole, blocks: tuple[int, ...]) -> float:
        """Peak bytes of a device whose stages (one, or several chunks) hold these numbers of blocks."""
        key = (role, blocks)
        if key not in self._needs:
            self._needs[key] = self._compute(role, blocks)
        return self._needs[key]

    def most_blocks(self, role: RankRole, memory_bytes: float) -> int:
        """The most blocks that fit into the usable part of that memory; -1 when not even none."""
        key = (role, memory_bytes)
        if key not in self._most:
            low, high, chunks = -1, self.work.spec.layers, role.stages // role.pp
            while low < high:
                middle = (low + high + 1) // 2
                fits = self.need(role, in_chunks(middle, chunks)) <= USABLE * memory_bytes
                low, high = (middle, high) if fits else (low, middle - 1)
            self._most[key] = low
        return self._most[key]

    def _compute(self, role: RankRole, blocks: tuple[int, ...]) -> float:
        work = self.work
        live = live_micro_batches(role.schedule, role.pp, role.stages, role.micro_batches)
        per_parameter = STATE_BYTES + CHECKPOINT_BYTES + CAST_BYTES * (work.precision == "bf16")
        block = work.block_bytes(role.micro_batch, role.tp)
        boundary = work.boundary_bytes(role.micro_batch)
        logits = work.spec.logits_bytes(role.micro_batch, work.seq_len, work.head_shards(role.tp))
        total = PROCESS_BYTES[role.kind] + block  # gradients inside the block that is at work
        gradients = 0.0
        for stage, count in zip(range(role.rank, role.stages, role.pp), blocks, strict=True):
            share = Share(count, stage == 0, stage == role.stages - 1)
            parameters = work.parameters(share, role.tp)
            gradients += 4.0 * parameters
            total += per_parameter * parameters
            # What came in and what goes out is kept beside the blocks' own.
            total += live[stage] * (count * block + 2 * boundary + logits * share.last)
        if role.dp > 1:
            # The bucket that gradients are summed in; a large embedding is one of its own.
            table = 4.0 * work.spec.embedding_parameters() / work.head_shards(role.tp)
            total += min(gradients, max(BUCKET_BYTES, table))
        return total


def in_chunks(count: int, chunks: int) -> tuple[int, ...]:
    """A rank's blocks over its stages: equal, the rest to the earlier ones."""
    return tuple(count // chunks + (chunk < count % chunks) for chunk in range(chunks))
