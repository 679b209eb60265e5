"""Tensor parallelism of a stage with torch's DTensor styles (Shoeybi et al. 2019: columns, then rows).

Forward: two all-reduces a block, after the attention and after the SwiGLU. Backward: two, at their inputs.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from hpctrain.model.part import blocks_of
from hpctrain.records.imported_spec import ImportedSpec, Spec


def vocabulary_is_split(spec: Spec, tp: int) -> bool:
    """Whether embedding and head are split over tp: only when every device gets the same share."""
    return spec.head_shards(tp) > 1


def apply_tensor_parallel(module: nn.Module, mesh: DeviceMesh, spec: Spec) -> None:
    """Split the matrices of a plain, initialised stage in place over the 1-D mesh.

    After return the head (when split) gives local logits [batch, seq, vocab / tp].
    """
    for block in blocks_of(module).values():
        parallelize_module(block, mesh, _block_styles(spec))
    if not vocabulary_is_split(spec, mesh.size()):
        return
    if module.embedding is not None:
        parallelize_module(module.embedding, mesh, RowwiseParallel(input_layouts=Replicate()))  # type: ignore[arg-type]
    if module.head is not None:
        parallelize_module(module.head, mesh, ColwiseParallel())  # type: ignore[arg-type]


def _block_styles(spec: Spec) -> dict[str, ParallelStyle]:
    if isinstance(spec, ImportedSpec):
        styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
        return {name: styles[split]() for name, split in spec.tensor_parallel.items()}

    # PrepareModuleInput makes one DTensor of the input, so that the gradients of its users are summed before the
    # all-reduce of the backward pass: one instead of one for each of q, k and v.
    def shared_input() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))

    return {
        "attention": shared_input(),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "feed_forward": shared_input(),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
    }
