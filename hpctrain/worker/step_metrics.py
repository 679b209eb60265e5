"""From what each rank counted to one line in metrics.jsonl."""

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
    """What one rank knows about a step."""

    loss_share: float
    counters: dict[int, StageCounters]
    schedule_s: float
    """How long the schedule took, from its first action to its last."""
    dp_bytes: int
    tp_bytes: int
    compression: dict[str, float]
    """Figures of its reducer, by names in `REDUCER_METRICS`."""
    stop: bool
    save: bool


@dataclass(frozen=True)
class GlobalStepMetrics:
    """The step over all ranks, the same on each of them after the gather."""

    loss: float
    bytes_sent: BytesSent
    compression: CompressionFigures | None
    stage_time_s: list[float]
    stage_forward_s: list[float]
    stage_backward_s: list[float]
    bubble_fraction: float | None
    """As in MetricRow."""
    micro_batches: list[int]
    memory_bytes_max: float
    stop: bool
    save: bool


_SCALARS = 10 + len(REDUCER_METRICS)


def gather_step_metrics(trainer: Trainer, mine: RankStepMetrics) -> GlobalStepMetrics:
    """Exchange what each rank counted. Collective over the world: one all-gather of a few numbers."""
    stages = len(trainer.plan.stages)
    times = [0.0] * 3 * stages
    for index, counters in mine.counters.items():
        times[index::stages] = [counters.compute_s, counters.forward_s, counters.backward_s]
    # Every tp rank computes the same loss: one of them speaks for the row.
    speaks = 1.0 if trainer.coordinate.tp == 0 else 0.0
    scalars = [
        mine.loss_share * speaks,
        _idle_fraction(mine),
        float(mine.dp_bytes),
        float(sum(counters.sent_bytes for counters in mine.counters.values())),
        float(mine.tp_bytes),
        float(mine.stop),
        float(mine.save),
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
    """Share of the schedule's time in which this rank computed nothing."""
    compute_s = sum(counters.compute_s for counters in mine.counters.values())
    return 1.0 - compute_s / mine.schedule_s


def _combine(table: torch.Tensor, plan: Plan) -> GlobalStepMetrics:
    total = table.sum(0).tolist()
    largest = table.max(0).values.tolist()
    compute, forward, backward = torch.tensor(largest[_SCALARS:]).view(3, -1).tolist()
    counted = [0] * plan.dp
    for row in table.tolist():
        counted[int(row[8])] = max(counted[int(row[8])], int(row[9]))
    return GlobalStepMetrics(
        loss=total[0],
        bytes_sent=BytesSent(dp=int(total[2]), pp=int(total[3]), tp=int(total[4])),
        compression=_figures(table[:, 10:_SCALARS]),
        stage_time_s=compute,
        stage_forward_s=forward,
        stage_backward_s=backward,
        bubble_fraction=total[1] / plan.world_size if plan.pp > 1 else None,
        micro_batches=counted,
        memory_bytes_max=largest[7],
        stop=largest[5] > 0,
        save=largest[6] > 0,
    )


def _figures(table: torch.Tensor) -> CompressionFigures | None:
    """The means over the ranks that have a figure, of [ranks, figures] with NaN where there is none."""
    means = dict(zip(REDUCER_METRICS, table.nanmean(0).tolist(), strict=True))
    found = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    return CompressionFigures(**found) if found else None


def rank_placements(trainer: Trainer, counters: dict[int, StageCounters]) -> list[RankPlacement] | None:
    """What every rank really holds, read back from its objects. Collective; a list on rank 0 only."""
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
    """metrics.jsonl as rank 0 writes it. A row that finds no room on the disk waits and is written with a later one."""

    def __init__(self, path: Path, fence: Fence) -> None:
        self._path = path
        self._fence = fence
        self._waiting: list[str] = []

    def write(self, row: MetricRow) -> None:
        """Append a row, after those that are still waiting.

        Raises:
            Superseded: the writer's generation is over.
        """
        self._waiting.append(json.dumps(row.to_json(), allow_nan=False))
        with contextlib.suppress(StorageError):
            self.flush()

    def flush(self) -> None:
        """Write what is waiting.

        Raises:
            StorageError: there is still no room; the rows go on waiting.
            Superseded: the writer's generation is over.
        """
        while self._waiting:
            self._fence.check()
            append_line(self._path, self._waiting[0])
            del self._waiting[0]

    def try_flush(self) -> str | None:
        """As `flush`; why rows still wait, where they do."""
        try:
            self.flush()
        except StorageError as error:
            return str(error)
        return None


def metric_row(trainer: Trainer, job: GlobalStepMetrics, info: LocalStepInfo) -> MetricRow:
    """The row of the step that was just done."""
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
    """What rank 0 knows about a step beyond the gather."""

    seconds: float
    lr: float
    grad_norm: float
    valid_losses: Mapping[str, float]
    """By validation set; empty where there was no validation."""
    placement: list[RankPlacement] | None
    loss_scale: float | None = None
    """That the step was computed with."""
