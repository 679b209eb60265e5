"""An entry of `compression` in plan.json: a level of the sum of gradients, its codec, and how mode auto chose it."""

from __future__ import annotations

from pydantic import Field, model_validator

from hpctrain.records.format.document import Part
from hpctrain.records.plan.compression import Codec, NoCompression
from hpctrain.records.plan.gradient_codec import IntraNode, Level
from hpctrain.records.plan.layer_groups import LayerGroup


class CodecFigures(Part):
    """The planner's prediction for one codec that mode auto compared. Bytes and seconds of sums are those of the stage
    whose all-reduce takes longest. All figures are absent if the codec cannot be used. `sent_bytes`, `wire_s` and
    `processor_s` are also absent if ZeRO shards over all replicas, because gradients are then summed within the
    backward pass."""

    codec: Codec
    """The codec with its settings."""
    intra_node: IntraNode | None = None
    """How the replicas of a node sum gradients first, as it is best with this codec; absent if the nodes have one
    replica each, or unequally many."""
    sent_bytes: float | None = None
    """Bytes that a device sends in a step, after the warm-up steps."""
    wire_s: float | None = None
    """Seconds that the messages of a step take on the slowest link: their number × alpha + their bytes × beta."""
    processor_s: float | None = None
    """Seconds in which a device selects, encodes, decodes and copies numbers in a step."""
    hidden_s: float | None = None
    """Part of `wire_s` that overlaps the backward pass, seconds."""
    step_s: float | None = None
    """Seconds of a whole step, as the mean over the run, warm-up steps included."""
    predicted_gap: float | None = None
    """With codecs by layer group: the predicted gap of the loss to that of exact sums, as 0.01 for 1 %."""
    verdict: str
    """'chosen', or why the codec was not chosen."""


class CodecSpec(Part):
    """How a plan reduces gradients between replicas: the codec, and how mode auto chose it."""

    level: Level = "dp"
    """Over what the codec sums. dp: the replicas or, under hybrid sharding, the copies of a sharded state. intra_node:
    the replicas of a node, with codec none or bf16. inter_node: the nodes."""
    codec: Codec = Field(default_factory=NoCompression)
    """The codec with all its settings."""
    reason: str | None = None
    """With mode auto: why the planner chose the codec."""
    group_reasons: dict[LayerGroup, str] | None = None
    """With mode auto and codecs by layer group: layer group -> its codec, and why the planner chose it."""
    compared: list[CodecFigures] = []
    """With mode auto: the codecs that were compared, in this order: none, bf16, int8, int4, then the others by the
    measured gap of their loss, the smallest first, and those without a measured gap. These others are there only if
    `lossy` or `loss_budget` allows them, adaptive only after steps in which gradients were measured. mixed, with a
    codec for each layer group, comes last, and is there only with a `loss_budget` that allows it."""

    @model_validator(mode="after")
    def _only_gradients(self) -> CodecSpec:
        if self.codec.activations is not None:
            raise ValueError(
                f"codec.activations: found {self.codec.activations}; a plan says it by stage: stages[…].messages"
            )
        if self.codec.intra_node is not None:
            raise ValueError(
                f"codec.intra_node: found {self.codec.intra_node}; a plan says it by level: compression[…].level"
            )
        if self.codec.tensor_parallel is not None:
            raise ValueError(
                f"codec.tensor_parallel: found {self.codec.tensor_parallel}; a plan says it in tensor_parallel_sums"
            )
        if self.level == "intra_node" and self.codec.mode not in ("none", "bf16"):
            raise ValueError(f"codec.mode: found {self.codec.mode} with level intra_node; allowed: none, bf16")
        return self
