"""The initial weights, by family. They depend only on the seed and the parameter names, not on the cut into stages."""

from __future__ import annotations

import math
import zlib

import torch
from torch import nn

from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.encoder_spec import EncoderSpec
from hpctrain.records.model.families import FamilySpec


@torch.no_grad()
def initialise(module: nn.Module, spec: FamilySpec, seed: int) -> None:
    """Initialise every parameter: biases with zeros, norms with ones, all others from a normal distribution.

    Each random parameter has its own generator, seeded by (seed, name).
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        generator = torch.Generator().manual_seed((seed << 32 | zlib.crc32(name.encode())) & (2**63 - 1))
        parameter.normal_(0.0, standard_deviation(spec, name), generator=generator)


def standard_deviation(spec: FamilySpec, name: str) -> float:
    """Return the standard deviation of a matrix's initial weights, by its name.

    It is `init_std`. In models with pre-norm, the two projections that write to the residual stream have init_std /
    √(2·layers) (Radford et al. 2019). T5 has 1/√(input width); its query weights are also divided by the root of the
    head width, because its scores are not.
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
