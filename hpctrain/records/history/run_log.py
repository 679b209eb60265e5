"""The log of a run: events.jsonl says what happened, metrics.jsonl has the figures of each step.

Both have one line per entry, in the order of writing. Rank 0 writes the metrics; a step that is repeated after a
recovery has a second line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.input_file import read_jsonl

EventKind = Literal[
    "attempt_started",
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
    "notify_failed",
    "finished",
    "failed",
]


class Event(Document):
    """A line of events.jsonl: one event of a run."""

    schema_kind: ClassVar[str] = "event"
    kind: EventKind

    time_s: float
    """Seconds since 1970."""
    attempt: int
    generation: int
    node: str
    """Node that wrote the event."""
    reason: str
    """What happened and why, in one sentence."""
    data: dict[str, Any] = {}


def read_events(path: Path, attempt: int | None = None) -> list[Event]:
    """Return the events in a file. A last line that a killed writer left incomplete is skipped.

    Args:
        attempt: return only the events of this attempt.
    """
    events = [Event.from_json(value, str(path)) for value in read_jsonl(path)]
    return events if attempt is None else [event for event in events if event.attempt == attempt]


def nodes_at_start(events: Sequence[Event]) -> list[str]:
    """Return the nodes that the attempt began with, from its attempt_started event; [] without one."""
    return next((list(event.data.get("nodes", [])) for event in events if event.kind == "attempt_started"), [])


def nodes_excluded_by_probe(events: Sequence[Event]) -> set[str]:
    """Return the nodes that the probe's verdict excludes."""
    return {str(node) for event in events if event.kind == "probed" for node in event.data.get("exclude", [])}


class BytesSent(Part):
    """Bytes that the whole job sends in a step, by mesh axis."""

    dp: int = 0
    """Bytes of gradients, and of sharded weights that are gathered."""
    pp: int = 0
    tp: int = 0


class RankPlacement(Part):
    """What a rank holds and runs, read from the model and schedule that its worker built."""

    rank: int
    device: str
    stages: list[int]
    layers: list[int]
    """Global numbers of the blocks that the rank holds."""
    micro_batch: int
    """Sequences in each of the rank's micro-batches."""
    micro_batches: int
    """Micro-batches whose forward pass the rank ran in the first step."""
    base_bytes: float | None = None
    """Peak memory of the worker before it built the model, measured as `memory_bytes_max`."""


class CompressionFigures(Part):
    """Figures of gradient compression in a step; means over the ranks."""

    density: float | None = None
    """Share of the compressed layers' numbers that is sent."""
    residual_norm_ratio: float | None = None
    """Norm of the residual, divided by the norm of the gradient."""


class ValidSet(Part):
    """Loss and perplexity on one named validation set."""

    loss: float
    """Mean cross-entropy, nats per target."""
    perplexity: float | None = None
    """e to the loss; absent where that overflows."""

    @classmethod
    def of(cls, loss: float) -> ValidSet:
        """Return the result of a validation set with this loss, in nats per target."""
        return cls(loss=loss, perplexity=perplexity(loss))


def perplexity(loss: float) -> float | None:
    """Return e to the loss in nats; None where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None


class MetricRow(Document):
    """A line of metrics.jsonl: the figures of one optimizer step."""

    schema_kind: ClassVar[str] = "metric"

    step: int
    """Number of the step; the first is 1."""
    generation: int
    time_s: float
    """Wall clock at the end of the step, seconds since 1970."""
    step_time_s: float
    """Duration of the step, seconds."""
    loss: float
    """Mean cross-entropy over the targets of the global batch, nats: all tokens (next_token), the masked tokens
    (masked), the decoder's tokens (span_corruption)."""
    valid_loss: float | None = None
    """Mean loss over the validation batches; only where this step validated."""
    valid_sets: dict[str, ValidSet] | None = None
    """Results for each validation set that the run file names."""
    lr: float
    grad_norm: float | None = None
    """Norm of the whole gradient before clipping; absent where it overflowed and the step was skipped."""
    loss_scale: float | None = None
    """With precision fp16: factor on this step's loss before the backward pass."""
    skipped: bool | None = None
    """With precision fp16: whether the gradients overflowed, so that the step changed no weight."""
    tokens: int
    """Tokens that the model read in this step, with or without a target: samples × data.seq_len. Tokens that the
    decoder of an encoder-decoder reads are not included."""
    samples: int
    """Sequences consumed since the start of the run."""
    source_samples: dict[str, int] | None = None
    """Sequences consumed from each training folder since the start of the run; only where folders have weights."""
    tokens_per_s: float
    bytes_sent: BytesSent
    compression: CompressionFigures | None = None
    """Figures of gradient compression; only in modes that have any."""
    stage_time_s: list[float]
    """Compute seconds of each stage: forward, loss and backward, slowest replica."""
    stage_forward_s: list[float] | None = None
    """Part of `stage_time_s` in forward and loss, for each stage, slowest replica."""
    stage_backward_s: list[float] | None = None
    """Part of `stage_time_s` in the backward pass, for each stage, slowest replica."""
    bubble_fraction: float | None = None
    """Share of the pipeline schedule's time in which a device did not compute, but waited for a neighbour or sent to
    one. Mean over devices; absent without a pipeline (pp 1). Collectives of tensor parallelism count as computation.
    Reduction over replicas, norm and optimizer come after the schedule and do not count at all. Under sharding the
    schedule includes collectives between replicas: those of zero 2 and 3 within a forward or backward pass count as
    computation, those that run once a step do not."""
    micro_batches: list[int]
    """Number of micro-batches that each replica ran forward in this step, as counted by its workers."""
    memory_bytes_max: float | None = None
    """Largest resident memory of a worker (CPU), or its largest allocation (CUDA), in bytes."""
    placement: list[RankPlacement] | None = None
    """What each rank actually runs; in the first row of each generation."""


def read_metrics(path: Path) -> list[MetricRow]:
    """Return all rows of a metrics file, in file order. A last line that a killed writer left incomplete is skipped."""
    return [MetricRow.from_json(value, str(path)) for value in read_jsonl(path)]


def last_row_of_each_step(rows: list[MetricRow]) -> list[MetricRow]:
    """Return one row per step, ordered by step: of a repeated step, the row of the highest generation. These rows are
    the history of the final model."""
    best: dict[int, MetricRow] = {}
    for row in rows:
        if row.step not in best or row.generation >= best[row.step].generation:
            best[row.step] = row
    return [best[step] for step in sorted(best)]
