"""What a training framework keeps and sends: hpctrain, and the frameworks whose published runs the cost model is
checked against.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.records.plan.compression import BUCKET_BYTES


@dataclass(frozen=True)
class Framework:
    """Bytes per number of a training framework, and which of its operations wait."""

    weight_bytes: int = 4
    """Bytes per parameter of the weights in training."""
    gradient_bytes: int = 4
    """Bytes per parameter of the gradients, kept and summed between replicas."""
    state_bytes: int = 8
    """Bytes per parameter of AdamW's two moments, and of a master copy if weights are in half precision."""
    checkpoint_bytes: int = 12
    """Bytes per parameter of the copy of weights and moments while a checkpoint is written during training."""
    bucket_bytes: float = BUCKET_BYTES
    """Largest bucket of gradients that is summed at once between replicas."""
    residual_stream_bytes: int = 4
    """Bytes per value of the residual stream, which is also sent between stages."""
    blocking_sends: bool = False
    """Whether a rank waits while it sends between stages; if False, sends overlap its computation."""
    split_sends: bool = False
    """Whether each device of a tensor-parallel group sends a part of the activation; if False, each sends the whole."""
    split_streams: int = 5
    """Number of additional copies of the residual stream that a block keeps with tensor parallelism.

    DTensor's all-reduces make them; counted on CPU with tp 2 at two widths (torch 2.13).
    """
    process_bytes: float | None = None
    """Bytes of a worker process beyond all counted tensors; None: those of hpctrain's worker (`PROCESS_BYTES`)."""
    selective_sends_again: bool = True
    """Whether selective recomputation repeats the tensor-parallel all-reduces."""

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes per parameter that stay allocated from step to step, including a checkpoint's copy."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes + self.checkpoint_bytes


HPCTRAIN_FRAMEWORK = Framework()
"""hpctrain's runtime: fp32 weights and gradients, autocast, sends in the background."""
