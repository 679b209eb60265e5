"""Gathers the figures of all ranks into one line of metrics.jsonl."""

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
from torch import Tensor

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
    """Figures of one rank about a step."""

    loss_share: float
    counters: dict[int, StageCounters]
    schedule_s: float
    """Seconds of the schedule, from the start of its first action to the end of its last."""
    dp_bytes: int
    tp_bytes: int
    compression: dict[str, float]
    """Figures of the rank's reducer, by names in `REDUCER_METRICS`."""
    stop: bool


@dataclass(frozen=True)
class GlobalStepMetrics:
    """Figures of a step over all ranks, the same on each rank. All fields but `stop` are those of `MetricRow`."""

    loss: float
    bytes_sent: BytesSent
    compression: CompressionFigures | None
    stage_time_s: list[float]
    stage_forward_s: list[float]
    stage_backward_s: list[float]
    bubble_fraction: float | None
    micro_batches: list[int]
    memory_bytes_max: float
    stop: bool


def gather_step_metrics(trainer: Trainer, of_rank: RankStepMetrics) -> GlobalStepMetrics:
    """Combine the figures of all ranks. Collective over all ranks: one all-gather of a few numbers."""
    counters = of_rank.counters.values()
    stages = len(trainer.plan.stages)
    times = [0.0] * 3 * stages
    for index, stage in of_rank.counters.items():
        times[index::stages] = [stage.compute_s, stage.forward_s, stage.backward_s]
    figures = {
        # Every tp rank computes the same loss, so only rank 0 of the tp group counts.
        "loss": of_rank.loss_share if trainer.coordinate.tp == 0 else 0.0,
        "idle_fraction": 1.0 - sum(stage.compute_s for stage in counters) / of_rank.schedule_s,
        "dp_bytes": of_rank.dp_bytes,
        "pp_bytes": sum(stage.sent_bytes for stage in counters),
        "tp_bytes": of_rank.tp_bytes,
        "stop": of_rank.stop,
        "memory_bytes": peak_memory_bytes(trainer.device),
        "replica": trainer.coordinate.dp,
        "micro_batches": max(stage.forwards for stage in counters),
        **{name: of_rank.compression.get(name, math.nan) for name in REDUCER_METRICS},
    }
    vector = torch.tensor([*figures.values(), *times], dtype=torch.float64)
    table = torch.empty(trainer.plan.world_size, len(vector), dtype=torch.float64)
    with ACTIVITY.doing("all-gather of metrics", waits=True):
        dist.all_gather(list(table.unbind(0)), vector)
    columns = dict(zip(figures, table.unbind(1), strict=False))
    return _combine(columns, table[:, len(figures) :].max(0).values.view(3, stages), trainer.plan)


def _combine(columns: Mapping[str, Tensor], stage_times: Tensor, plan: Plan) -> GlobalStepMetrics:
    """Return the figures over all ranks.

    Args:
        columns: figure -> its values by rank.
        stage_times: seconds of shape [computation, forward, backward; stages].
    """
    sums = {name: float(column.sum()) for name, column in columns.items()}
    micro_batches = [0] * plan.dp
    for replica, count in zip(columns["replica"].tolist(), columns["micro_batches"].tolist(), strict=True):
        micro_batches[int(replica)] = max(micro_batches[int(replica)], int(count))
    compute, forward, backward = ([round(time_s, 6) for time_s in times] for times in stage_times.tolist())
    return GlobalStepMetrics(
        loss=sums["loss"],
        bytes_sent=BytesSent(dp=int(sums["dp_bytes"]), pp=int(sums["pp_bytes"]), tp=int(sums["tp_bytes"])),
        compression=_compression_figures(columns),
        stage_time_s=compute,
        stage_forward_s=forward,
        stage_backward_s=backward,
        bubble_fraction=sums["idle_fraction"] / plan.world_size if plan.pp > 1 else None,
        micro_batches=micro_batches,
        memory_bytes_max=float(columns["memory_bytes"].max()),
        stop=sums["stop"] > 0,
    )


def _compression_figures(columns: Mapping[str, Tensor]) -> CompressionFigures | None:
    """Return the mean of each figure over the ranks that have it; NaN stands for a rank that has none."""
    means = {name: float(columns[name].nanmean()) for name in REDUCER_METRICS}
    known = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    return CompressionFigures(**known) if known else None


def rank_placements(trainer: Trainer, counters: dict[int, StageCounters]) -> list[RankPlacement] | None:
    """Return what every rank holds, read from its objects; None except on rank 0. Collective over all ranks."""
    replica = trainer.plan.replicas[trainer.coordinate.dp]
    placement = RankPlacement(
        rank=trainer.coordinate.rank,
        device=trainer.plan.ranks[trainer.coordinate.rank],
        stages=[stage.stage_index for stage in trainer.pipeline.stages],
        layers=trainer.pipeline.layers(),
        micro_batch=trainer.pipeline.sequences // replica.micro_batches,
        micro_batches=max(count.forwards for count in counters.values()),
        base_bytes=trainer.base_bytes,
    )
    everyone: list[object] | None = [None] * trainer.plan.world_size if dist.get_rank() == 0 else None
    dist.gather_object(placement.model_dump(), everyone)
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
        """Append the waiting rows and this row. A row that cannot be written waits for the next call.

        Raises:
            Superseded: the writer's generation is over.
        """
        self._waiting.append(json.dumps(row.to_json(), allow_nan=False))
        with contextlib.suppress(StorageError):
            self.flush()

    def flush(self) -> None:
        """Write the waiting rows.

        Raises:
            StorageError: a row could not be written; the rows continue to wait.
            Superseded: the writer's generation is over.
        """
        while self._waiting:
            self._fence.check()
            append_line(self._path, self._waiting[0])
            del self._waiting[0]

    def try_flush(self) -> str | None:
        """Flush and return the error; None if all rows are written."""
        try:
            self.flush()
        except StorageError as error:
            return str(error)
        return None


def metric_row(trainer: Trainer, job: GlobalStepMetrics, info: LocalStepInfo) -> MetricRow:
    """Return the row of metrics.jsonl of the step that was just done."""
    tokens = trainer.plan.sequences * trainer.run.data.seq_len
    samples = trainer.step * trainer.plan.sequences
    gathered = {name: value for name, value in vars(job).items() if name != "stop"}
    return MetricRow(
        step=trainer.step,
        generation=trainer.generation,
        time_s=time.time(),
        step_time_s=info.seconds,
        valid_loss=info.valid_losses.get(UNNAMED_SET),
        valid_sets={name: ValidSet.of(loss) for name, loss in info.valid_losses.items() if name != UNNAMED_SET} or None,
        lr=info.lr,
        grad_norm=info.grad_norm if math.isfinite(info.grad_norm) else None,
        loss_scale=info.loss_scale,
        skipped=None if info.loss_scale is None else not math.isfinite(info.grad_norm),
        tokens=tokens,
        samples=samples,
        source_samples=trainer.train.taken(samples),
        tokens_per_s=tokens / info.seconds,
        placement=info.placement,
        **gathered,
    )


@dataclass(frozen=True)
class LocalStepInfo:
    """Figures of a step that are not gathered over ranks."""

    seconds: float
    lr: float
    grad_norm: float
    valid_losses: Mapping[str, float]
    """Loss by validation set; empty if there was no validation."""
    placement: list[RankPlacement] | None
    loss_scale: float | None = None
    """Loss scale of the step's backward pass; only in fp16, else None."""
