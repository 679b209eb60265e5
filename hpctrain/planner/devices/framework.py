"""What a training framework keeps and sends: ours, and those whose published runs the model is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.records.plan.codec import BUCKET_BYTES


@dataclass(frozen=True)
class Framework:
    """Bytes per number, and what waits for what."""

    weight_bytes: int = 4
    """Per parameter, in training."""
    gradient_bytes: int = 4
    """Per parameter, kept and summed between replicas."""
    state_bytes: int = 8
    """Per parameter: the two moments of AdamW, and a master copy where weights are kept in half precision."""
    checkpoint_bytes: int = 12
    """Per parameter while a checkpoint is written beside the training: a copy of weight and moments."""
    bucket_bytes: float = BUCKET_BYTES
    """Most of the gradients that are summed at once between replicas."""
    residual_stream_bytes: int = 4
    """Per value of the residual stream, which also travels between stages."""
    casts: bool = True
    """Whether weights in fp32 are cast for the matrix products in bf16 and fp16 (autocast)."""
    blocking_sends: bool = False
    """Whether a rank stands still while it sends between stages; else it computes meanwhile."""
    split_sends: bool = False
    """Whether each of a unit's devices sends a part of the activation; else each sends the whole."""
    split_streams: int = 5
    """Residual streams that a block keeps more when it is split over tensor parallelism. Seen on CPU with tp 2 at two
    widths (torch 2.13): copies that DTensor's sums make."""
    process_bytes: float | None = None
    """Per device beside all tensors that are counted; None: what a worker of ours takes."""
    selective_sends_again: bool = True
    """Whether selective recomputation repeats the sums of tensor parallelism."""

    @property
    def bytes_per_parameter(self) -> int:
        """Everything that stays from step to step, and a checkpoint's copy."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes + self.checkpoint_bytes


HPCTRAIN_FRAMEWORK = Framework()
"""fp32 weights and gradients, autocast, sends in the background."""
