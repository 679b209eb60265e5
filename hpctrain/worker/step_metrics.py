"""Gathers the counts of all ranks into one line of metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.atomic import append_line
from hpctrain.base.errors import StorageError
from hpctrain.compress.reducers.reducer import REDUCER_METRICS
from hpctrain.parallel.stage import StageCounters
from hpctrain.records.history.generation import Fence
from hpctrain.records.history.metric import BytesSent, CompressionFigures, MetricRow, RankPlacement, ValidSet
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.batch_loader import UNNAMED_SET
from hpctrain.worker.build import Trainer
from hpctrain.worker.memory import peak_memory_bytes


@dataclass(frozen=True)
class RankStepMetrics:
    """The figures of one rank about a step."""

    loss_share: float
    counters: dict[int, StageCounters]
    schedule_s: float
    """Duration of the schedule, from its first action to its last."""
    dp_bytes: int
    tp_bytes: int
    compression: dict[str, float]
    """Figures of the rank's reducer, by names in `REDUCER_METRICS`."""
    stop: bool


@dataclass(frozen=True)
class GlobalStepMetrics:
    """The figures of a step over all ranks, the same on each rank after the gather."""

    loss: float
    bytes_sent: BytesSent
    compression: CompressionFigures | None
    stage_time_s: list[float]
    stage_forward_s: list[float]
    stage_backward_s: list[float]
    bubble_fraction: float | None
    """As in `MetricRow`."""
    micro_batches: list[int]
    memory_bytes_max: float
    stop: bool


_SCALARS = 9 + len(REDUCER_METRICS)


def gather_step_metrics(trainer: Trainer, mine: RankStepMetrics) -> GlobalStepMetrics:
    """Combine the figures of all ranks. Collective over all ranks: one all-gather of a few numbers."""
    stages = len(trainer.plan.stages)
    times = [0.0] * 3 * stages
    for index, counters in mine.counters.items():
        times[index::stages] = [counters.compute_s, counters.forward_s, counters.backward_s]
    # Every tp rank computes the same loss: only rank 0 of the group counts.
    speaks = 1.0 if trainer.coordinate.tp == 0 else 0.0
    scalars = [
        mine.loss_share * speaks,
        _idle_fraction(mine),
        float(mine.dp_bytes),
        float(sum(counters.sent_bytes for counters in mine.counters.values())),
        float(mine.tp_bytes),
        float(mine.stop),
        peak_memory_bytes(trainer.device),
        float(trainer.coordinate.dp),
        float(max(counters.forwards for counters in mine.counters.values())),
        *(mine.compression.get(name, math.nan) for name in REDUCER_METRICS),
    ]
    vector = torch.tensor(scalars + times, dtype=torch.float64)
    table = torch.empty(trainer.plan.world_size, len(vector), dtype=torch.float64)
    with ACTIVITY.doing("all-gather of metrics", waits=True):
        dist.all_gather(list(table.unbind(0)), vector)
    return _combine(table, trainer.plan)


def _idle_fraction(mine: RankStepMetrics) -> float:
    """Return the share of the schedule's time in which this rank computed nothing."""
    compute_s = sum(counters.compute_s for counters in mine.counters.values())
    return 1.0 - compute_s / mine.schedule_s


def _combine(table: torch.Tensor, plan: Plan) -> GlobalStepMetrics:
    total = table.sum(0).tolist()
    largest = table.max(0).values.tolist()
    compute, forward, backward = torch.tensor(largest[_SCALARS:]).view(3, -1).tolist()
    counted = [0] * plan.dp
    for row in table.tolist():
        counted[int(row[7])] = max(counted[int(row[7])], int(row[8]))
    return GlobalStepMetrics(
        loss=total[0],
        bytes_sent=BytesSent(dp=int(total[2]), pp=int(total[3]), tp=int(total[4])),
        compression=_figures(table[:, 9:_SCALARS]),
        stage_time_s=compute,
        stage_forward_s=forward,
        stage_backward_s=backward,
        bubble_fraction=total[1] / plan.world_size if plan.pp > 1 else None,
        micro_batches=counted,
        memory_bytes_max=largest[6],
        stop=largest[5] > 0,
    )


def _figures(table: torch.Tensor) -> CompressionFigures | None:
    """Return the mean of each figure over the ranks that have it.

    Args:
        table: figures of shape [ranks, figures], NaN where a rank has none.
    """
    means = dict(zip(REDUCER_METRICS, table.nanmean(0).tolist(), strict=True))
    found = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    return CompressionFigures(**found) if found else None


def rank_placements(trainer: Trainer, counters: dict[int, StageCounters]) -> list[RankPlacement] | None:
    """Return what every rank really holds, read from its objects; None except on rank 0. Collective."""
    replica = trainer.plan.replicas[trainer.coordinate.dp]
    mine = RankPlacement(
        rank=trainer.coordinate.rank,
        device=trainer.plan.ranks[trainer.coordinate.rank],
        stages=[stage.stage_index for stage in trainer.pipeline.stages],
        layers=trainer.pipeline.layers(),
        micro_batch=trainer.pipeline.rows // replica.micro_batches,
        micro_batches=max(count.forwards for count in counters.values()),
        base_bytes=trainer.base_bytes,
    )
    everyone: list[object] | None = [None] * trainer.plan.world_size if dist.get_rank() == 0 else None
    dist.gather_object(mine.model_dump(), everyone)
    if everyone is None:
        return None
    return [RankPlacement.model_validate(item) for item in everyone]


class MetricsLog:
    """The writer of metrics.jsonl on rank 0. A row that cannot be written waits and is written with a later one."""

    def __init__(self, path: Path, fence: Fence) -> None:
        self._path = path
        self._fence = fence
        self._waiting: list[str] = []

    def write(self, row: MetricRow) -> None:
        """Append the waiting rows and this row; what cannot be written waits.

        Raises:
            Superseded: the writer's generation is over.
        """
        self._waiting.append(json.dumps(row.to_json(), allow_nan=False))
        with contextlib.suppress(StorageError):
            self.flush()

    def flush(self) -> None:
        """Write the waiting rows.

        Raises:
            StorageError: a row could not be written; the rows go on waiting.
            Superseded: the writer's generation is over.
        """
        while self._waiting:
            self._fence.check()
            append_line(self._path, self._waiting[0])
            del self._waiting[0]

    def try_flush(self) -> str | None:
        """Flush and return the error; None when all rows are written."""
        try:
            self.flush()
        except StorageError as error:
            return str(error)
        return None


def metric_row(trainer: Trainer, job: GlobalStepMetrics, info: LocalStepInfo) -> MetricRow:
    """Return the row of metrics.jsonl of the step that was just done."""
    run, plan = trainer.run, trainer.plan
    tokens = plan.sequences * run.data.seq_len
    return MetricRow(
        step=trainer.step,
        generation=trainer.generation,
        time_s=time.time(),
        step_time_s=info.seconds,
        loss=job.loss,
        valid_loss=info.valid_losses.get(UNNAMED_SET),
        valid_sets={name: ValidSet.of(loss) for name, loss in info.valid_losses.items() if name != UNNAMED_SET} or None,
        lr=info.lr,
        grad_norm=info.grad_norm if math.isfinite(info.grad_norm) else None,
        loss_scale=info.loss_scale,
        skipped=None if info.loss_scale is None else not math.isfinite(info.grad_norm),
        tokens=tokens,
        samples=trainer.step * plan.sequences,
        source_samples=trainer.train.taken(trainer.step * plan.sequences),
        tokens_per_s=tokens / info.seconds,
        bytes_sent=job.bytes_sent,
        compression=job.compression,
        stage_time_s=[round(value, 6) for value in job.stage_time_s],
        stage_forward_s=[round(value, 6) for value in job.stage_forward_s],
        stage_backward_s=[round(value, 6) for value in job.stage_backward_s],
        bubble_fraction=job.bubble_fraction,
        micro_batches=job.micro_batches,
        memory_bytes_max=job.memory_bytes_max,
        placement=info.placement,
    )


@dataclass(frozen=True)
class LocalStepInfo:
    """The figures of a step that are not gathered."""

    seconds: float
    lr: float
    grad_norm: float
    valid_losses: Mapping[str, float]
    """Loss by validation set; empty when there was no validation."""
    placement: list[RankPlacement] | None
    loss_scale: float | None = None
    """Loss scale of the step's backward pass; only in fp16."""
