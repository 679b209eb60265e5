"""From a ModelSpec to initialised modules. The weights depend on the seed and their names alone, not on the cut."""

from __future__ import annotations

import math
import zlib

import torch
from torch import nn

from hpctrain.model.decoder import Decoder
from hpctrain.model.imported import build_imported
from hpctrain.records.imported_spec import ImportedSpec, Spec
from hpctrain.records.model_spec import ModelSpec


def build_stage(spec: Spec, start: int, stop: int, seed: int) -> nn.Module:
    """Blocks [start, stop) with embedding when start is 0 and head when stop is the last layer.

    An empty first stage holds the embedding alone; an empty last stage, the head alone.
    """
    return build_part(spec, start, stop, first=start == 0, last=stop == spec.layers, seed=seed)


def build_part(spec: Spec, start: int, stop: int, *, first: bool, last: bool, seed: int) -> nn.Module:
    """As `build_stage`, with the ends said by the caller (an empty stage at either end looks like the other)."""
    if isinstance(spec, ImportedSpec):
        return build_imported(spec, start, stop, first=first, last=last, seed=seed)
    with torch.device("meta"):
        module = Decoder(spec, start, stop, first, last)
    module.to_empty(device="cpu")
    module.tie()
    initialise(module, spec, seed)
    return module


@torch.no_grad()
def initialise(module: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill every parameter from a generator of its own, seeded by (seed, name).

    Normal with `init_std`; the two projections that write to the stream are scaled by 1/√(2·layers)
    (Radford et al. 2019); norms start at one.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed((seed << 32 | zlib.crc32(name.encode())) & (2**63 - 1))
        std = spec.init_std
        if name.endswith((".wo.weight", ".w2.weight")):
            std /= math.sqrt(2 * spec.layers)
        parameter.normal_(0.0, std, generator=generator)
