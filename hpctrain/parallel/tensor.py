"""Tensor parallelism of a stage with torch's DTensor styles (Shoeybi et al. 2019: columns, then rows).

Forward: two all-reduces a block, after the attention and after the SwiGLU. Backward: two, at their inputs.

With sequence parallelism (Korthikanti et al. 2022) each of them becomes a reduce-scatter and an all-gather along the
sequence, the same bytes in all; in between, norms and the residual stream are held and computed in parts. A stage then
takes and gives activations [batch, seq / tp, dim].
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from hpctrain.model.part import blocks_of
from hpctrain.records.imported_spec import ImportedSpec, Spec

SEQUENCE = Shard(1)
"""Activations are [batch, seq, dim]."""


def vocabulary_is_split(spec: Spec, tp: int) -> bool:
    """Whether embedding and head are split over tp: only when every device gets the same share."""
    return spec.head_shards(tp) > 1


def apply_tensor_parallel(module: nn.Module, mesh: DeviceMesh, spec: Spec, sequence: bool = False) -> None:
    """Split the matrices of a plain, initialised stage in place over the 1-D mesh.

    After return the head (when split) gives local logits [batch, seq, vocab / tp].

    Args:
        sequence: split norms and the residual stream along the sequence too.
    """
    if isinstance(spec, ImportedSpec):
        for block in blocks_of(module).values():
            parallelize_module(block, mesh, _declared_styles(spec))
        return
    stream = SEQUENCE if sequence else Replicate()
    for block in blocks_of(module).values():
        parallelize_module(block, mesh, _block_styles(stream))
    split = vocabulary_is_split(spec, mesh.size())
    for name, style in _end_styles(stream, split).items():
        part = getattr(module, name)
        if part is not None:
            parallelize_module(part, mesh, style)
    module.tie()  # type: ignore[operator]


def _declared_styles(spec: ImportedSpec) -> dict[str, ParallelStyle]:
    styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
    return {name: styles[split]() for name, split in spec.tensor_parallel.items()}


def _block_styles(stream: Placement) -> dict[str, ParallelStyle]:
    # PrepareModuleInput makes one DTensor of the input, so that the gradients of its users are summed before the
    # collective of the backward pass: one instead of one for each of q, k and v.
    def whole_input() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))

    styles = {
        "attention": whole_input(),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=stream),
        "feed_forward": whole_input(),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=stream),
    }
    if stream == SEQUENCE:
        styles |= {"attention_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel()}
    return styles


def _end_styles(stream: Placement, split: bool) -> dict[str, ParallelStyle]:
    """Styles of embedding, last norm and head."""
    styles: dict[str, ParallelStyle] = {}
    if split:
        styles["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        styles["head"] = ColwiseParallel(input_layouts=stream)
    elif stream == SEQUENCE:
        # A whole embedding is looked up by every rank, which keeps its part; a whole head works on the whole sequence.
        styles["embedding"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=stream)
        styles["head"] = PrepareModuleInput(
            input_layouts=stream, desired_input_layouts=Replicate(), use_local_output=True
        )
    if stream == SEQUENCE:
        styles["norm"] = SequenceParallel()
    return styles
