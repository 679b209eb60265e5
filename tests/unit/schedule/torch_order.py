"""The order in which torch itself runs its schedules, recorded by stages that only write down what they are asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

CASES = [
    ("gpipe", 1, 1, 3),
    ("gpipe", 2, 2, 4),
    ("gpipe", 3, 3, 2),
    ("1f1b", 1, 1, 4),
    ("1f1b", 2, 2, 2),
    ("1f1b", 3, 3, 5),
    ("1f1b", 4, 4, 8),
    ("interleaved_1f1b", 2, 4, 1),
    ("interleaved_1f1b", 2, 4, 4),
    ("interleaved_1f1b", 2, 6, 8),
    ("interleaved_1f1b", 3, 6, 2),
    ("interleaved_1f1b", 4, 8, 10),
    ("interleaved_zero_bubble", 1, 1, 2),
    ("interleaved_zero_bubble", 2, 2, 6),
    ("interleaved_zero_bubble", 4, 4, 6),
    ("interleaved_zero_bubble", 2, 4, 1),
    ("interleaved_zero_bubble", 2, 6, 8),
    ("interleaved_zero_bubble", 3, 6, 2),
    ("interleaved_zero_bubble", 4, 8, 10),
    ("zbv", 1, 2, 3),
    ("zbv", 2, 4, 1),
    ("zbv", 2, 4, 6),
    ("zbv", 3, 6, 4),
    ("zbv", 4, 8, 9),
]
"""(name, pipeline ranks, stages, micro-batches)."""


class RecordingStage:
    """Looks like a pipeline stage to torch's schedules and records its compute calls."""

    def __init__(self, index: int, stages: int, ranks: int, calls: list[str]) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank = ranks, index % ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.submod = SimpleNamespace()
        self._calls = calls

    def forward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self._calls.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self._calls.append(f"{self.stage_index}B{micro_batch}")

    def get_fwd_recv_ops(self, micro_batch: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, factor: int) -> None:
        pass


PLANNED = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
"""Schedules of several stages a rank: every rank knows the order of all."""


def torch_rows(name: str, ranks: int, stages: int, micro_batches: int) -> list[list[str]]:
    """Compute actions by pipeline rank: executed for the single-stage schedules, planned for the others."""
    if name in PLANNED:
        first_rank = (0, 2 * ranks - 1) if name == "zbv" else range(0, stages, ranks)
        own = [RecordingStage(stage, stages, ranks, []) for stage in first_rank]
        order = PLANNED[name](own, micro_batches).pipeline_order  # type: ignore[arg-type]
        return [[str(action) for action in order[rank] if action is not None] for rank in range(ranks)]
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    rows = []
    for rank in range(ranks):
        calls: list[str] = []
        schedule = kind(RecordingStage(rank, stages, ranks, calls), micro_batches)  # type: ignore[arg-type]
        schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
        schedule._initialize_stage = lambda *args, **kwargs: None  # type: ignore[method-assign]
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        rows.append(calls)
    return rows
