"""From a spec to initialised modules. The weights depend on the seed and their names alone, not on the cut."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hpctrain.model.decoder import Decoder
from hpctrain.model.encoder import Encoder
from hpctrain.model.encoder_decoder import EncoderDecoder
from hpctrain.model.gpt2 import Gpt2
from hpctrain.model.imported.model import build_imported
from hpctrain.model.init_weights import initialise
from hpctrain.model.transformer_part import TransformerPart
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.encoder_spec import EncoderSpec
from hpctrain.records.model.families import FamilySpec
from hpctrain.records.model.gpt2_spec import Gpt2Spec
from hpctrain.records.model.imported_spec import ImportedSpec, Spec


def build_stage(spec: Spec, start: int, stop: int, seed: int) -> nn.Module:
    """Blocks [start, stop) with embedding when start is 0 and head when stop is the last layer.

    An empty first stage holds the embedding alone; an empty last stage, the head alone.
    """
    return build_part(spec, start, stop, first=start == 0, last=stop == spec.layers, seed=seed)


Fill = Callable[[nn.Module], None]
"""Gives the parameters of a plain stage their values."""


def build_part(
    spec: Spec, start: int, stop: int, *, first: bool, last: bool, seed: int, fill: Fill | None = None
) -> nn.Module:
    """As `build_stage`, with the ends said by the caller (an empty stage at either end looks like the other).

    Args:
        fill: where the weights come from, for a model that the seed does not decide.
    """
    if isinstance(spec, ImportedSpec):
        return build_imported(spec, start, stop, first=first, last=last, seed=seed)
    with torch.device("meta"):
        module = build_modules(spec, start, stop, first, last)
    module.to_empty(device="cpu")
    module.tie()
    if fill is not None:
        fill(module)
    else:
        initialise(module, spec, seed)
    return module


def build_modules(spec: FamilySpec, start: int, stop: int, first: bool, last: bool) -> TransformerPart:
    """The stage's modules, before their weights have values."""
    match spec:
        case DecoderSpec():
            return Decoder(spec, start, stop, first, last)
        case Gpt2Spec():
            return Gpt2(spec, start, stop, first, last)
        case EncoderSpec():
            return Encoder(spec, start, stop, first, last)
        case EncoderDecoderSpec():
            return EncoderDecoder(spec, start, stop, first, last)
