"""Gathers each step's figures of all ranks, and writes them as one line of metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.atomic import append_line
from hpctrain.base.errors import StorageError
from hpctrain.compress.reducers.reducer import REDUCER_METRICS
from hpctrain.parallel.stage import StageCounters
from hpctrain.probe.measure.data_sheet import peak_flops
from hpctrain.records.format.input_file import LINE_BYTES, read_jsonl_tail
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.generation import Fence
from hpctrain.records.history.run_log import BytesSent, CompressionFigures, MetricRow, RankPlacement, ValidSet
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import Topology
from hpctrain.worker.agent_channel import Ending
from hpctrain.worker.batch_loader import UNNAMED_SET
from hpctrain.worker.build import Trainer, peak_memory_bytes
from hpctrain.worker.figures.rank_metrics import WAITS, StepTimesByRank, own_waits

TAIL_LINES = 8
"""Rows at the end of metrics.jsonl among which the newest step's is: a row that was cut off may follow it."""


class StepFigures(NamedTuple):
    """Figures of a step over all ranks, the same on each rank."""

    loss: float
    """Loss of the global batch in nats: the mean over its targets."""
    ending: Ending
    """How the training ends after this step: the highest value that the agent of any rank has ordered."""
    row: dict[str, Any]
    """The fields of `MetricRow` that are gathered over the ranks, the loss included."""
    snapshot_step: int
    """Step of the newest snapshots of the state in memory; -1 unless those of all ranks are complete."""
    snapshot_every: int
    """Steps between two such snapshots: the largest interval that a rank asks for."""
    ranks: StepTimesByRank
    """Where each rank's time went."""


def gather_step_metrics(
    trainer: Trainer, loss_share: float, counters: dict[int, StageCounters], dp_bytes: int, tp_bytes: int, end: Ending
) -> StepFigures:
    """Combine this rank's figures of a step with those of all ranks. Collective: one all-gather of a few numbers.

    Args:
        loss_share: this replica's share of the global batch's mean loss, as `Pipeline.step` returns it.
        counters: stage -> its times, bytes and micro-batches on this rank.
        dp_bytes: bytes that this rank sent for the reduction over replicas.
        tp_bytes: bytes that this rank sent for tensor parallelism.
        end: how this rank's agent has ordered the training to end.

    Raises:
        Exception: this rank's newest snapshot could not be copied or sent.
    """
    stages = len(trainer.plan.stages)
    times = [0.0] * 3 * stages
    for index, stage in counters.items():
        times[index::stages] = [stage.compute_s, stage.forward_s, stage.backward_s]
    compression, levels = trainer.reducer.metrics(), trainer.reducer.level_bytes
    figures = {
        # Every tp rank computes the same loss, so only rank 0 of the tp group counts.
        "loss": loss_share if trainer.coordinate.tp == 0 else 0.0,
        "idle_fraction": 1.0 - sum(stage.compute_s for stage in counters.values()) / trainer.pipeline.step_s,
        "dp_bytes": dp_bytes,
        "dp_intra_node": math.nan if levels is None else levels.intra_node,
        "dp_inter_node": math.nan if levels is None else levels.inter_node,
        "pp_bytes": sum(stage.sent_bytes for stage in counters.values()),
        "tp_bytes": tp_bytes,
        "ending": end,
        "memory_bytes": peak_memory_bytes(trainer.device),
        "replica": trainer.coordinate.dp,
        "micro_batches": max(stage.forwards for stage in counters.values()),
        "snapshot_step": -1 if trainer.ring is None else trainer.ring.complete(trainer.step + 1),
        "snapshot_every": 0 if trainer.ring is None else trainer.ring.interval(),
        **{name: compression.get(name, math.nan) for name in REDUCER_METRICS},
        **own_waits(),
    }
    vector = torch.tensor([*figures.values(), *times], dtype=torch.float64)
    table = torch.empty(trainer.plan.world_size, len(vector), dtype=torch.float64)
    with ACTIVITY.doing("all-gather of metrics", waits="world"):
        dist.all_gather(list(table.unbind(0)), vector)
    columns = dict(zip(figures, table.unbind(1), strict=False))
    return _combine(columns, table[:, len(figures) :].view(-1, 3, stages), trainer.plan)


def _combine(columns: Mapping[str, Tensor], stage_times: Tensor, plan: Plan) -> StepFigures:
    """Return a step's figures over all ranks.

    Args:
        columns: name of a figure -> its values by rank.
        stage_times: seconds of computation, [ranks, 3, stages]: of each stage all computation, that of the forward
            passes, and that of the backward passes.
    """
    sums = {name: float(column.sum()) for name, column in columns.items()}
    micro_batches = [0] * plan.dp
    for replica, count in zip(columns["replica"].tolist(), columns["micro_batches"].tolist(), strict=True):
        micro_batches[int(replica)] = max(micro_batches[int(replica)], int(count))
    compute, forward, backward = ([round(time_s, 6) for time_s in times] for times in stage_times.amax(0).tolist())
    row = {
        "loss": sums["loss"],
        "bytes_sent": BytesSent(
            dp=int(sums["dp_bytes"]),
            pp=int(sums["pp_bytes"]),
            tp=int(sums["tp_bytes"]),
            **{name: int(sums[name]) for name in ("dp_intra_node", "dp_inter_node") if math.isfinite(sums[name])},
        ),
        "compression": _compression_figures(columns),
        "stage_time_s": compute,
        "stage_forward_s": forward,
        "stage_backward_s": backward,
        "bubble_fraction": sums["idle_fraction"] / plan.world_size if plan.pp > 1 else None,
        "micro_batches": micro_batches,
        "memory_bytes_max": float(columns["memory_bytes"].max()),
    }
    snapshot, every = int(columns["snapshot_step"].min()), int(columns["snapshot_every"].max())
    ranks = StepTimesByRank(stage_times[:, 1:], {name: columns[name] for name in (*WAITS, "memory_bytes")})
    ending = Ending(int(columns["ending"].max()))
    return StepFigures(sums["loss"], ending, row, snapshot, every, ranks)


def _compression_figures(columns: Mapping[str, Tensor]) -> CompressionFigures | None:
    """Return the mean of each figure of compression over the ranks that have the figure; None if no rank has any.
    NaN stands for a rank without the figure."""
    means = {name: float(columns[name].nanmean()) for name in REDUCER_METRICS}
    known = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    return CompressionFigures(**known) if known else None


def rank_placements(trainer: Trainer, counters: dict[int, StageCounters]) -> list[RankPlacement] | None:
    """Return what each rank holds, in the order of ranks, read from the objects that compute and not from the plan;
    None except on rank 0. Collective over all ranks.

    Args:
        counters: stage -> what this rank counted for the stage in the first step.
    """
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
        """Append the waiting rows and `row`. Rows that cannot be written wait for the next call.

        Raises:
            Superseded: the writer's generation is over.
        """
        self._waiting.append(json.dumps(row.to_json(), allow_nan=False))
        with contextlib.suppress(StorageError):
            self.flush()

    def flush(self) -> None:
        """Write the waiting rows, in order.

        Raises:
            StorageError: a row could not be written; this row and the later ones continue to wait.
            Superseded: the writer's generation is over.
        """
        while self._waiting:
            self._fence.check()
            append_line(self._path, self._waiting[0])
            del self._waiting[0]

    def has_step(self, step: int) -> bool:
        """Return whether the file has a row of `step`. Only its end is read.

        Raises:
            UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
        """
        try:
            rows = read_jsonl_tail(self._path, LINE_BYTES, TAIL_LINES)
        except OSError:
            return False
        return any(row.get("step") == step for row in rows)

    def try_flush(self) -> str | None:
        """Write the waiting rows. Return the error; None if all rows are on disk.

        Raises:
            Superseded: the writer's generation is over.
        """
        try:
            self.flush()
        except StorageError as error:
            return str(error)
        return None


def peak_flops_of_plan(trainer: Trainer) -> float | None:
    """Return the sum over the plan's GPUs of the FLOP/s in their data sheets, in dense 16-bit matrix products.

    None in fp32, without a topology in the run folder, or if a device's data sheet is not known.

    Raises:
        InputError: the topology has errors or is untrusted.
    """
    path = trainer.folder / "topology.json"
    if trainer.run.precision == "fp32" or not path.exists():
        return None
    topology = Topology.read(path, owned=True)
    names = {
        DeviceId.of(node.id, device.id): topology.device_types[device.type].name
        for node in topology.nodes
        for device in node.devices
    }
    peaks = [peak_flops(names.get(device, "")) for device in trainer.plan.ranks]
    return None if None in peaks else sum(peak for peak in peaks if peak is not None)


def metric_row(trainer: Trainer, step: int, job: StepFigures, info: LocalStepInfo, peak: float | None) -> MetricRow:
    """Return the row of metrics.jsonl for a step of the trainer.

    Args:
        step: number of the step; the first step is 1.
        job: the step's figures over all ranks.
        info: the step's figures that rank 0 knows by itself.
        peak: FLOP/s of all devices by their data sheets; None if unknown.
    """
    flops = 3 * trainer.run.spec().forward_flops(trainer.plan.sequences, trainer.run.data.seq_len)
    tokens = trainer.plan.sequences * trainer.run.data.seq_len
    samples = step * trainer.plan.sequences
    return MetricRow(
        step=step,
        generation=trainer.generation,
        time_s=time.time(),
        step_time_s=info.seconds,
        **validation_fields(info.valid_losses),
        lr=info.lr,
        grad_norm=info.grad_norm if math.isfinite(info.grad_norm) else None,
        loss_scale=info.loss_scale,
        skipped=None if info.loss_scale is None else not math.isfinite(info.grad_norm),
        tokens=tokens,
        samples=samples,
        source_samples=trainer.train.taken(samples),
        tokens_per_s=tokens / info.seconds,
        mfu=None if peak is None else flops / info.seconds / peak,
        placement=info.placement,
        **job.row,
    )


def validation_fields(losses: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of a row that have the results of a validation: name -> value.

    Args:
        losses: name of a validation set -> mean loss in nats per target.
    """
    named = {name: ValidSet.of(loss) for name, loss in losses.items() if name != UNNAMED_SET}
    return {"valid_loss": losses.get(UNNAMED_SET), "valid_sets": named or None}


@dataclass(frozen=True)
class LocalStepInfo:
    """Figures of a step that a rank knows by itself, without the other ranks. Rank 0 writes its own."""

    seconds: float
    """Seconds of the step, from reading the batch to the updated weights."""
    lr: float
    """Learning rate."""
    grad_norm: float
    """Norm of the gradient of the whole model, before clipping."""
    valid_losses: Mapping[str, float]
    """Name of a validation set -> mean loss in nats per target; empty if there was no validation."""
    placement: list[RankPlacement] | None
    """What each rank holds, in the order of ranks; None except for the worker's first step."""
    loss_scale: float | None = None
    """Loss scale of the step's backward pass; only in fp16, else None."""
