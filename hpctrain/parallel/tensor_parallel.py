"""Tensor parallelism of a stage with torch's DTensor styles (Shoeybi et al. 2019: the first matrix of a layer is split
by columns, the last by rows).

A block has two all-reduces in the forward pass, after attention and after the feed-forward layer, and two in the
backward pass, at the inputs of these layers. A decoder block of an encoder-decoder has one more for cross-attention in
the forward pass, and more in the backward pass.

With sequence parallelism (Korthikanti et al. 2022) each all-reduce becomes a reduce-scatter and an all-gather along the
sequence, with the same bytes in total. Between these two collectives, each rank holds and computes its part of the
norms and the residual stream. A stage then takes and returns activations [batch, seq / tp, dim].
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from hpctrain.model.imported.model import blocks_of
from hpctrain.parallel.tensor_sums import SEQUENCE_DIM, LevelSums, with_sums
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import EncoderSpec, FamilySpec
from hpctrain.records.model.imported_spec import ImportedSpec, Spec
from hpctrain.records.model.transformers_spec import TransformersSpec

SEQUENCE = Shard(SEQUENCE_DIM)
"""DTensor placement of activations [batch, seq, dim] that are split along the sequence."""


def vocabulary_is_split(spec: Spec, tp: int) -> bool:
    """Return whether embedding and head are split by vocabulary over `tp` devices. They are split only if every device
    gets equally many tokens of the vocabulary.
    """
    return spec.head_shards(tp) > 1


def apply_tensor_parallel(
    module: nn.Module, mesh: DeviceMesh, spec: Spec, sequence: bool = False, sums: LevelSums | None = None
) -> None:
    """Split the matrices of a plain, initialised stage in place over the devices of a mesh.

    If the head is split, the stage then returns local logits [batch, seq, vocab / tp].

    Args:
        module: the stage.
        mesh: [tp].
        spec: the model's spec, no `TransformersSpec`; for your own model, it names the linear layers to split.
        sequence: whether to use sequence parallelism: norms and the residual stream are split along the sequence too.
        sums: how activations are summed in training; None: exactly.
    """
    if isinstance(spec, ImportedSpec):
        for block in blocks_of(module).values():
            parallelize_module(block, mesh, with_sums(_declared_styles(spec), sums))
        return
    assert not isinstance(spec, TransformersSpec), "its plans have tp 1"
    stream = SEQUENCE if sequence else Replicate()
    for block in blocks_of(module).values():
        names = {name for name, _ in block.named_modules()}
        styles = {name: style for name, style in _block_styles(stream, spec).items() if name in names}
        parallelize_module(block, mesh, with_sums(styles, sums))
    split = vocabulary_is_split(spec, mesh.size())
    for name, style in with_sums(_end_styles(stream, split, spec), sums).items():
        part = getattr(module, name, None)
        if part is not None:
            parallelize_module(part, mesh, style)
    module.tie()  # type: ignore[operator]


def _declared_styles(spec: ImportedSpec) -> dict[str, ParallelStyle]:
    styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
    return {name: styles[split]() for name, split in spec.tensor_parallel.items()}


def _block_styles(stream: Placement, spec: FamilySpec) -> dict[str, ParallelStyle]:
    """Return name of a module in a block -> torch's style for it, for all modules that a block of any family may have.

    Args:
        stream: placement of the residual stream.
        spec: the model's spec.
    """

    # PrepareModuleInput makes the input one DTensor, so that the gradients from q, k and v are summed before the
    # collective of the backward pass: one collective instead of three.
    def whole_input(*more: Placement | None) -> PrepareModuleInput:
        whole = tuple(None if layout is None else Replicate() for layout in more)
        return PrepareModuleInput(input_layouts=(stream, *more), desired_input_layouts=(Replicate(), *whole))

    two_streams = isinstance(spec, EncoderDecoderSpec)
    styles: dict[str, ParallelStyle] = {
        # The bias that is added to the scores already holds only this device's heads.
        "attention": whole_input(None) if two_streams else whole_input(),
        "cross_attention": whole_input(None, stream),
        "feed_forward": whole_input(),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=stream),
    }
    for attention in ("attention", "cross_attention"):
        styles |= {f"{attention}.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        styles[f"{attention}.wo"] = RowwiseParallel(output_layouts=stream)
    if isinstance(spec, DecoderSpec) and spec.qk_norm != "none":
        # Queries and keys are split by heads: [batch, heads / tp, seq, head_width], or [batch, seq, width / tp].
        style = SequenceParallel(sequence_dim=1, use_local_output=True) if spec.qk_norm == "head" else _SplitNorm()
        styles |= {"attention.q_norm": style, "attention.k_norm": style}
    if stream == SEQUENCE:
        norms = ("attention_norm", "attention_output_norm", "feed_forward_norm", "feed_forward_output_norm")
        styles |= {name: SequenceParallel(use_local_output=True) for name in norms}
    return styles


class _SplitNorm(ParallelStyle):
    """Splits a norm over its last dimension: each device has a part of the input and of the weight, and the mean of
    squares is taken over all devices.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for key, weight in list(part.named_parameters(recurse=False)):
                part.register_parameter(key, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))

        def gather(part: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, [Shard(-1)], run_check=False)

        def local(part: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.redistribute(mesh, [Shard(-1)]).to_local()

        return distribute_module(module, device_mesh, split, gather, local)  # type: ignore[arg-type]  # hooks may return


def _end_styles(stream: Placement, split: bool, spec: FamilySpec) -> dict[str, ParallelStyle]:
    """Return name of a module outside of blocks -> torch's style for it, for all such modules that any family may have.

    Args:
        stream: placement of the residual stream.
        split: whether embedding and head are split.
        spec: the model's spec.
    """
    # The transform in an encoder's head is whole on every device, and so is its input.
    before_head = Replicate() if isinstance(spec, EncoderSpec) else stream
    styles: dict[str, ParallelStyle] = {"relative_encoder": ColwiseParallel(), "relative_decoder": ColwiseParallel()}
    if split:
        styles["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        styles["head"] = ColwiseParallel(input_layouts=before_head)
    if stream != SEQUENCE:
        return styles
    # Each rank keeps its part of a whole look-up; a module with whole weights gets the whole sequence.
    for name in ("positions", "segments") if split else ("embedding", "positions", "segments"):
        styles[name] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=stream)
    gathered = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate(), use_local_output=True)
    if isinstance(spec, EncoderSpec):
        styles["transform"] = gathered
    elif not split:
        styles["head"] = gathered
    return styles | {
        "embedding_norm": SequenceParallel(use_local_output=True),
        "norm": SequenceParallel(use_local_output=True),
    }
