"""Builds initialised stages from a model's spec. The weights depend only on the seed and their names, not on the cut
into stages.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hpctrain.model.decoder import Decoder, Gpt2
from hpctrain.model.encoder import Encoder
from hpctrain.model.encoder_decoder import EncoderDecoder
from hpctrain.model.from_transformers.stage import build_transformers
from hpctrain.model.imported.model import build_imported
from hpctrain.model.layers import StageBlocks, TransformerPart
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import EncoderSpec, FamilySpec, Gpt2Spec
from hpctrain.records.model.hf_model import HfSpec
from hpctrain.records.model.imported_spec import ImportedSpec, Spec
from hpctrain.records.model.transformers_spec import TransformersSpec


@torch.no_grad()
def initialise(named: Iterable[tuple[str, Tensor]], spec: HfSpec, seed: int) -> None:
    """Initialise parameters by name: biases with zeros, norms so that they multiply by one, all others from a normal
    distribution. The row of the padding token in an embedding is zero, as in torch.

    Each random parameter has its own generator, seeded by (seed, name), so the weights do not depend on the cut.
    """
    norm = 0.0 if isinstance(spec, DecoderSpec) and spec.norm_offset else 1.0
    counts_text = isinstance(spec, EncoderSpec) and spec.position_offset > 0
    tables = ("embedding.weight", "positions.weight") if counts_text else ("embedding.weight",)
    for name, parameter in named:
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith(".bias") else norm)
            continue
        generator = torch.Generator().manual_seed((seed << 32 | zlib.crc32(name.encode())) & (2**63 - 1))
        parameter.normal_(0.0, standard_deviation(spec, name), generator=generator)
        if spec.padding_id is not None and name in tables:
            parameter[spec.padding_id] = 0.0


def standard_deviation(spec: HfSpec, name: str) -> float:
    """Return the standard deviation of a matrix's initial weights, by the matrix's name.

    Most matrices have `init_std` of the spec. In all models but encoders, the two projections of a block that write to
    the residual stream have init_std / √(2·layers) (Radford et al. 2019). T5 has 1 for the embedding, 1/√`dim` for the
    tables of relative positions, and 1/√(input width) for other matrices. For the query matrices of T5, 1/√(input
    width) is also divided by the root of the head width, because T5's attention scores are not.
    """
    if isinstance(spec, EncoderDecoderSpec):
        return _of_t5(spec, name)
    if name.endswith((".wo.weight", ".w2.weight")) and not isinstance(spec, EncoderSpec):
        return spec.init_std / math.sqrt(2 * spec.layers)
    return spec.init_std


def _of_t5(spec: EncoderDecoderSpec, name: str) -> float:
    if name == "embedding.weight":
        return 1.0
    if name.endswith(".wq.weight"):
        return (spec.dim * spec.head_width) ** -0.5
    if name.endswith(".wo.weight"):
        return spec.inner**-0.5
    if name.endswith(".w2.weight"):
        return spec.hidden**-0.5
    return spec.dim**-0.5


def build_stage(spec: Spec, start: int, stop: int, seed: int) -> nn.Module:
    """Return blocks [start, stop) with weights from the seed; also the embedding if start is 0, and the head if stop is
    the number of layers.

    A first stage without blocks holds only the embedding; a last stage without blocks, only the head. An imported model
    has front modules in place of the embedding, and back modules in place of the head.

    Raises:
        InputError: the user's factory or transformers fails, or builds another model than the spec's.
    """
    return build_part(spec, StageBlocks(start, stop, start == 0, stop == spec.layers), seed)


Fill = Callable[[nn.Module], None]
"""Function that sets the values of a plain stage's parameters."""


def build_part(spec: Spec, blocks: StageBlocks, seed: int, fill: Fill | None = None) -> nn.Module:
    """Return a stage as `build_stage` does, but let `blocks` say whether the stage is the first or the last one.

    The block numbers do not show this for a stage without blocks.

    Args:
        spec: the model's spec.
        blocks: the stage's blocks, and whether it is the first or the last stage.
        seed: seed of the weights.
        fill: sets the weights; None: they come from the seed.

    Raises:
        InputError: the user's factory or transformers fails, or builds another model than the spec's.
    """
    module: nn.Module
    if isinstance(spec, ImportedSpec):
        module = build_imported(spec, blocks, seed)
    elif isinstance(spec, TransformersSpec):
        module = build_transformers(spec, blocks)
    else:
        module = _uninitialised(spec, blocks)
    if fill is not None:
        fill(module)
    elif not isinstance(spec, ImportedSpec):
        initialise(module.named_parameters(), spec, seed)
    return module


def _uninitialised(spec: FamilySpec, blocks: StageBlocks) -> nn.Module:
    with torch.device("meta"):
        module = build_modules(spec, blocks)
    module.to_empty(device="cpu")
    module.tie()
    return module


def build_modules(spec: FamilySpec, blocks: StageBlocks) -> TransformerPart:
    """Return the modules of a stage of any family, with uninitialised weights."""
    match spec:
        case DecoderSpec():
            return Decoder(spec, blocks)
        case Gpt2Spec():
            return Gpt2(spec, blocks)
        case EncoderSpec():
            return Encoder(spec, blocks)
        case EncoderDecoderSpec():
            return EncoderDecoder(spec, blocks)
