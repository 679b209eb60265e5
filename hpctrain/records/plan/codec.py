"""The codec of a plan: which compression the workers use, and why."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.records.format.document import Part
from hpctrain.records.plan.compression import Codec, NoCompression

BUCKET_BYTES = 8 * 2**20
"""Size of a gradient bucket in bytes: large enough for full bandwidth, small enough for the first buckets to be sent
early."""


class CodecFigures(Part):
    """The planner's prediction for one codec, on the pipeline rank whose all-reduce takes longest."""

    codec: Codec
    """The codec with its settings."""
    sent_bytes: float | None = None
    """Bytes that a device sends in a step, after the warm-up steps."""
    wire_s: float | None = None
    """Seconds of the messages on the slowest link: their number times alpha plus their bytes times beta."""
    processor_s: float | None = None
    """Seconds of selecting, encoding, decoding and copying numbers on the device."""
    hidden_s: float | None = None
    """Part of `wire_s` that overlaps the backward pass, seconds."""
    step_s: float | None = None
    """Seconds of a whole step: the mean over the run, warm-up steps included. Absent where the codec cannot be used."""
    verdict: str
    """'chosen', or why it was not chosen."""


class CodecSpec(Part):
    """How gradients are reduced between replicas."""

    level: Literal["dp"] = "dp"
    """Mesh axis of the reduction: the replicas or, under hybrid sharding, the copies of a sharded state."""
    codec: Codec = Field(default_factory=NoCompression)
    """The codec with all settings and the layers that it compresses."""
    reason: str | None = None
    """With mode auto: why this codec was chosen."""
    compared: list[CodecFigures] = []
    """With mode auto: the codecs that were compared, the least lossy first."""

    @model_validator(mode="after")
    def _only_gradients(self) -> CodecSpec:
        if self.codec.activations is not None:
            raise ValueError(
                f"codec.activations: found {self.codec.activations}; a plan says it by stage: stages[…].messages"
            )
        return self


NO_COMPRESSION_CODEC = CodecSpec()
