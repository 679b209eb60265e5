"""metrics.jsonl: one line a step, written by rank 0. A step that is repeated after a recovery is a second line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.jsonl import read_jsonl


class BytesSent(Part):
    """Bytes on the wire of the whole job in a step, by mesh axis."""

    dp: int = 0
    """Gradients, and weights that are gathered because they are sharded."""
    pp: int = 0
    tp: int = 0


class RankPlacement(Part):
    """What a rank really holds and runs, read back from the objects that were built."""

    rank: int
    device: str
    stages: list[int]
    layers: list[int]
    """Global numbers of the blocks it holds."""
    micro_batch: int
    """Sequences in its micro-batches."""
    micro_batches: int
    """Micro-batches it ran forward in the first step."""
    base_bytes: float | None = None
    """Its peak memory before it built the model, counted as `memory_bytes_max` is."""


class CompressionFigures(Part):
    """What the compression of gradients did in a step; means over the ranks."""

    density: float | None = None
    """Numbers sent, as a share of those that are compressed."""
    residual_norm_ratio: float | None = None
    """Norm of what is kept back for later steps, by that of the gradient."""


class ValidSet(Part):
    """What was found on one named validation set."""

    loss: float
    """Mean cross-entropy, nats a target."""
    perplexity: float | None = None
    """Its exponential; absent where that is too large for a number."""

    @classmethod
    def of(cls, loss: float) -> ValidSet:
        """The set's figures from its loss."""
        return cls(loss=loss, perplexity=perplexity(loss))


def perplexity(loss: float) -> float | None:
    """e to the loss in nats; None where that is too large for a number."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None


class MetricRow(Document):
    """One optimizer step."""

    schema_kind: ClassVar[str] = "metric"

    step: int
    """1 is the first."""
    generation: int
    time_s: float
    """Wall clock at the end of the step, seconds since 1970."""
    step_time_s: float
    """How long the step took."""
    loss: float
    """Mean cross-entropy over the targets of the global batch, nats: of each token (next_token), of the hidden ones
    (masked), of all that the decoder writes (span_corruption)."""
    valid_loss: float | None = None
    """The same over the validation batches, where this step validated."""
    valid_sets: dict[str, ValidSet] | None = None
    """The same for each validation set that the run file names."""
    lr: float
    grad_norm: float | None = None
    """Norm of the whole gradient before clipping; absent where it overflowed and the step was skipped."""
    loss_scale: float | None = None
    """With precision fp16: what this step's loss was multiplied by before the backward pass."""
    skipped: bool | None = None
    """With precision fp16: whether the gradients overflowed, so that the step changed no weight."""
    tokens: int
    """Tokens that the model read in this step: samples × data.seq_len, with or without a target; what the decoder of a
    model with two stacks reads is not in it."""
    samples: int
    """Sequences consumed since the start of the run."""
    source_samples: dict[str, int] | None = None
    """Of them, how many came from each training folder; where folders have weights."""
    tokens_per_s: float
    bytes_sent: BytesSent
    compression: CompressionFigures | None = None
    """With a mode of compression that has any of these figures."""
    stage_time_s: list[float]
    """Compute time of each stage, forward, loss and backward, slowest replica."""
    stage_forward_s: list[float] | None = None
    """Of that, forward and loss of each stage, slowest replica."""
    stage_backward_s: list[float] | None = None
    """Of that, backward of each stage, slowest replica."""
    bubble_fraction: float | None = None
    """Of the time that the pipeline's schedule took, the share in which a device computed nothing: it waited for a
    neighbour or sent to one. Mean over devices; absent without a pipeline (pp 1). Collectives of tensor parallelism
    count as a stage's computation; reduction over replicas, norm and optimizer come after the schedule and do not count
    at all. Under sharding the schedule holds the exchange between replicas too: what zero 2 and 3 exchange within a
    forward or backward counts as computation, what comes once a step does not."""
    micro_batches: list[int]
    """Micro-batches that each replica ran forward in this step, counted."""
    memory_bytes_max: float | None = None
    """Largest resident memory of a worker (CPU), or largest allocation (CUDA)."""
    placement: list[RankPlacement] | None = None
    """In the first row of each generation: what each rank really runs."""


def read_metrics(path: Path) -> list[MetricRow]:
    """All rows of a metrics file, in file order; half a line at the end, of a killed writer, is left out."""
    return [MetricRow.from_json(value, str(path)) for value in read_jsonl(path)]


def last_row_of_each_step(rows: list[MetricRow]) -> list[MetricRow]:
    """One row a step, that of the highest generation, in order of steps: the history that led to the final model."""
    best: dict[int, MetricRow] = {}
    for row in rows:
        if row.step not in best or row.generation >= best[row.step].generation:
            best[row.step] = row
    return [best[step] for step in sorted(best)]
