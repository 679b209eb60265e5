"""The log of a run: events.jsonl says what happened, metrics.jsonl has the figures of each step.

Lines are in the order of writing. The worker of rank 0 writes metrics.jsonl. A step that is repeated after a recovery
has another line in metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.input_file import read_jsonl

EventKind = Literal[
    "attempt_started",
    "environment_changed",
    "probing",
    "probed",
    "data_staged",
    "data_not_staged",
    "planned",
    "generation_started",
    "worker_died",
    "worker_hung",
    "node_lost",
    "node_left_out",
    "node_returned",
    "agent_crashed",
    "fork_server_lost",
    "preempted",
    "time_limit",
    "checkpoint_saved",
    "checkpoint_skipped",
    "from_seed",
    "checkpoints_lost",
    "waiting_for_room",
    "residuals_dropped",
    "recovered",
    "replanned",
    "adapted",
    "adaptation_measured",
    "notify_failed",
    "tracker_failed",
    "gpu_unhealthy",
    "finished",
    "failed",
]


EVENTS: Mapping[EventKind, str] = {
    "attempt_started": "An attempt began on these `nodes`.",
    "environment_changed": "Software or devices differ from the first attempt (`changed`) or between nodes (`mixed`).",
    "probing": "The probe is in this `phase`: `done` of `planned`.",
    "probed": "The probe ended with the verdict `status`; `exclude` are nodes that plans avoid, `seconds` its time.",
    "data_staged": "The corpus `folder` is on the node's own disk, at `copy`; `size_bytes` were copied in `seconds`.",
    "data_not_staged": "The corpus `folder` is read where it is.",
    "planned": "The first plan is in the file `plan`: made, or as given.",
    "generation_started": "A generation of these `members` runs the file `plan` (`pp`, `dp`, `tp`) from the checkpoint "
    "`restore`, or from `first_weights`. `memory`: from the state of this `step` in memory, which `generation` made; "
    "`lost_steps` is the number of steps that are done again.",
    "worker_died": "The worker of `rank` on `node` ended by `signal` or with `exit_code`, in `step` at `operation`; "
    "`fault` is its row in the table of faults, `error` what it reported.",
    "worker_hung": "No worker made a step in recovery.progress_timeout_s; `hung` are those that block others.",
    "node_lost": "The `node` is gone; `crashed`: its agent had an error of its own.",
    "node_left_out": "The `node` is no member of the next generation, although it may live.",
    "node_returned": "The `node` is a member again.",
    "agent_crashed": "The agent of `node` ended by `error`.",
    "fork_server_lost": "The process that starts the workers of `node` ended; `replaced`: another one was started.",
    "preempted": "The attempt was asked to stop by `asked_by`, a signal; a checkpoint is saved first.",
    "time_limit": "The time limit of the job is near, or has ended it.",
    "checkpoint_saved": "The checkpoint of `step` is on disk: `size_bytes` of all ranks, after `seconds`.",
    "checkpoint_skipped": "A checkpoint could not be saved (`step`), or is not used because it is damaged (`path`); "
    "`now` is its new name.",
    "from_seed": "The run starts again from the seed, as a person asked; `aside` are the new names of its checkpoints.",
    "checkpoints_lost": "The run had saved a checkpoint, and none can be used.",
    "waiting_for_room": "The disk is full; the last checkpoint (`step`) waits for space.",
    "residuals_dropped": "Some parts of gradients that ranks had not sent yet are lost; `reason` says which.",
    "recovered": "The first `step` after a fault is done, `seconds` after the fault was seen.",
    "replanned": "A new plan for the present nodes is in the file `plan`; `moves` counts state that changes device.",
    "adapted": "All ranks stopped after the same step, and the generation runs the plan in the file `plan`, because of "
    "measured times; in seconds a step, the old plan takes `measured_step_time_s`, the new one is predicted to take "
    "`predicted_step_time_s`. `corrects_probe`: plans were compared for the first time, and no speed had changed. "
    "`taken_back`: the new plan is the one before the last change.",
    "adaptation_measured": "What came true of the plan of `generation`: a step takes `measured_step_time_s`, "
    "`predicted_step_time_s` were predicted; `kept` says whether the plan stays.",
    "notify_failed": "The URL of `notify` did not take the POST about `state`.",
    "tracker_failed": "The `tracker` gets no metrics of this attempt any more; the run goes on.",
    "gpu_unhealthy": "The `device` of `node` has a `problem`: throttled, by `reasons`; ecc: it has `errors` more "
    "uncorrectable memory errors; or xid: NVIDIA's driver reported this `xid`. The run goes on.",
    "finished": "All steps are done: `step`, `loss`, and with `deterministic` the `weights_sha256`.",
    "failed": "The attempt ends with `exit_code`; after a worker's failure with its `node`, `device`, `rank`, `fault` "
    "and `error`.",
}
"""What each event says; keys of its `data` are in backticks."""


class Event(Document):
    """A line of events.jsonl: one event of a run."""

    schema_kind: ClassVar[str] = "event"
    kind: EventKind
    """What happened; `EVENTS` describes each kind."""

    time_s: float
    """When the event was written, seconds since 1970."""
    attempt: int
    """Number of the attempt."""
    generation: int
    """Number of the generation; -1 before the first one."""
    node: str
    """Node that wrote the event."""
    reason: str
    """What happened and why, in one sentence."""
    data: dict[str, Any] = {}
    """Further keys, which depend on `kind`."""


def read_events(path: Path, attempt: int | None = None) -> list[Event]:
    """Return the events in events.jsonl at `path`, in file order; [] without the file. Incomplete lines are skipped:
    their writer was killed.

    Args:
        attempt: number of the attempt whose events are returned; None: events of all attempts.

    Raises:
        FileError: the file cannot be read, or a line is no event of this version.
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    events = [Event.from_json(value, str(path)) for value in read_jsonl(path)]
    return events if attempt is None else [event for event in events if event.attempt == attempt]


def nodes_at_start(events: Sequence[Event]) -> list[str]:
    """Return the nodes with which an attempt began, from its event attempt_started; [] if `events` has no such
    event."""
    return next((list(event.data.get("nodes", [])) for event in events if event.kind == "attempt_started"), [])


def nodes_excluded_by_probe(events: Sequence[Event]) -> set[str]:
    """Return the nodes that the verdicts of probes excluded, from the events `probed`."""
    return {str(node) for event in events if event.kind == "probed" for node in event.data.get("exclude", [])}


class BytesSent(Part):
    """Bytes that all ranks together send in a step, by mesh axis (dp, pp, tp)."""

    dp: int = 0
    """Bytes of gradients, and of sharded weights that are gathered."""
    dp_intra_node: int | None = None
    """Part of `dp`: bytes of gradients that replicas sent to others on their node, with hybrid sharding also of
    weights; absent unless gradients are summed by level."""
    dp_inter_node: int | None = None
    """Part of `dp`: bytes of gradients that replicas sent to other nodes; absent unless gradients are summed by
    level."""
    pp: int = 0
    """Bytes of stage messages."""
    tp: int = 0
    """Bytes of the collectives of tensor parallelism."""


class RankPlacement(Part):
    """What a rank holds and runs: its device, stages, blocks and micro-batches, read from the model and schedule that
    its worker built."""

    rank: int
    """Number of the rank."""
    device: str
    """Device of the rank, as node:device."""
    stages: list[int]
    """Numbers of the pipeline stages that the rank holds."""
    layers: list[int]
    """Numbers, within the whole model, of the blocks that the rank holds."""
    micro_batch: int
    """Sequences in each of the rank's micro-batches."""
    micro_batches: int
    """Micro-batches whose forward pass the rank ran in the first step."""
    base_bytes: float | None = None
    """Peak memory in bytes that the worker took before it built the model, measured as `MetricRow.memory_bytes_max`;
    absent in files of older versions."""


class CompressionFigures(Part):
    """Figures of gradient compression in a step, as means over the ranks. A figure that the codec does not have is
    absent."""

    density: float | None = None
    """Share of the gradient's numbers that is sent, counted over the compressed parameters."""
    residual_norm_ratio: float | None = None
    """Norm of a rank's residual, divided by the norm of its gradient."""


class ValidSet(Part):
    """Loss and perplexity on one of the validation folders that `data.valid` names."""

    loss: float
    """Mean cross-entropy, nats per target."""
    perplexity: float | None = None
    """e to the power of the loss; absent if too large for a float."""

    @classmethod
    def of(cls, loss: float) -> ValidSet:
        """Return the result of a validation folder with this loss, in nats per target."""
        return cls(loss=loss, perplexity=perplexity(loss))


def perplexity(loss: float) -> float | None:
    """Return the perplexity, e to the power of the loss in nats; None if it is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None


class MetricRow(Document):
    """A line of metrics.jsonl: the figures of one optimizer step."""

    schema_kind: ClassVar[str] = "metric"

    step: int
    """Number of the step; the first step is 1."""
    generation: int
    """Number of the generation that did the step. A step that is repeated after a recovery has a higher one."""
    time_s: float
    """Wall clock at the end of the step, seconds since 1970."""
    step_time_s: float
    """Duration of the step, seconds; of a step that another process finished, only until its gradients were summed."""
    loss: float
    """Mean cross-entropy in nats over the targets of the global batch. Targets are all tokens (next_token), the masked
    tokens (masked), or the decoder's tokens (span_corruption)."""
    valid_loss: float | None = None
    """Mean loss over the validation batches, in nats per target; only if the loss was validated after this step."""
    valid_sets: dict[str, ValidSet] | None = None
    """Name in `data.valid` -> result on that folder; only if `data.valid` names folders and the loss was validated."""
    lr: float
    """Learning rate of the step."""
    grad_norm: float | None = None
    """Norm of the gradient of all parameters before clipping; absent if it overflowed and the step was skipped."""
    loss_scale: float | None = None
    """With precision fp16: factor on this step's loss before the backward pass."""
    skipped: bool | None = None
    """With precision fp16: whether the gradients overflowed, so that the step changed no weight."""
    tokens: int
    """Tokens that the model read in this step, with or without a target: batch.global × data.seq_len. Tokens that the
    decoder of an encoder-decoder reads are not included."""
    samples: int
    """Sequences consumed since the start of the run."""
    source_samples: dict[str, int] | None = None
    """Path of a training folder -> sequences consumed from it since the start of the run; only if `data.train` gives
    the folders weights."""
    tokens_per_s: float
    """`tokens` divided by `step_time_s`."""
    mfu: float | None = None
    """Model FLOPs utilization (Chowdhery et al. 2022): FLOPs of the model's forward and backward pass, without
    recomputation, as a share of the dense 16-bit FLOPs that the plan's GPUs, by their data sheets, can do in the time
    of the step. Absent in fp32, and for GPUs without a known data sheet.
    """
    bytes_sent: BytesSent
    compression: CompressionFigures | None = None
    """Figures of gradient compression; only with codecs that have such figures."""
    stage_time_s: list[float]
    """Seconds of computation of each stage (forward pass, loss and backward pass) in its slowest replica."""
    stage_forward_s: list[float] | None = None
    """Seconds of computation of each stage in the forward pass and the loss, in its slowest replica; absent in files of
    older versions."""
    stage_backward_s: list[float] | None = None
    """Seconds of computation of each stage in the backward pass, in its slowest replica; absent in files of older
    versions."""
    bubble_fraction: float | None = None
    """Share of the pipeline schedule's time in which a device did not compute, but waited for another stage or sent to
    one, as the mean over devices. Absent without a pipeline (pp 1). Collectives of tensor parallelism count as
    computation, and so do collectives between replicas within a forward or backward pass (zero 2 and 3). Collectives of
    sharding that run once a step within the schedule count as waiting. Reduction over replicas, gradient norm and
    optimizer come after the schedule and do not count at all."""
    micro_batches: list[int]
    """Number of micro-batches whose forward pass each replica ran in this step, as counted by its workers."""
    memory_bytes_max: float | None = None
    """Peak memory in bytes of the worker with the most: resident memory without pages of files (CPU), or torch's
    allocations (CUDA)."""
    placement: list[RankPlacement] | None = None
    """What each rank holds and runs; only in the first row of each generation."""

    def figures(self) -> dict[str, float | int | bool]:
        """Return the row's figures by name, in a flat form: parts of a figure have names with dots, such as
        `bytes_sent.dp`, and elements of lists their positions, such as `stage_time_s.0`. `schema` and `placement` are
        left out, and so are figures that the row does not have."""
        return dict(_figures(self.to_json()))


def _figures(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | int | bool]]:
    for key, item in value.items():
        if not prefix and key in ("schema", "placement"):
            continue
        if isinstance(item, list):
            item = {str(index): part for index, part in enumerate(item)}
        if isinstance(item, dict):
            yield from _figures(item, f"{prefix}{key}.")
        elif isinstance(item, int | float):
            yield f"{prefix}{key}", item


def read_metrics(path: Path) -> list[MetricRow]:
    """Return all rows of metrics.jsonl at `path`, in file order; [] without the file. Incomplete lines are skipped:
    their writer was killed.

    Raises:
        FileError: the file cannot be read, or a line is no row of this version.
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    return [MetricRow.from_json(value, str(path)) for value in read_jsonl(path)]


def last_row_of_each_step(rows: list[MetricRow]) -> list[MetricRow]:
    """Return one row per step, ordered by step. For a step that was repeated, it is the row of the highest generation,
    because only the last repetition contributed to the final model."""
    best: dict[int, MetricRow] = {}
    for row in rows:
        if row.step not in best or row.generation >= best[row.step].generation:
            best[row.step] = row
    return [best[step] for step in sorted(best)]
