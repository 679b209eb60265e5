"""Rotary positions (Su et al. 2021), with the scalings of longer texts.

Shapes: queries and keys [batch, heads, seq, head_width]; a is the number of angles, half of the rotated width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpctrain.records.model.rope_scaling import LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope


def rotary_angles(
    seq: int, width: int, base: float, scaling: RopeScaling | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles of rotary positions: [seq, a] each, in fp32.

    Args:
        seq: number of positions.
        width: numbers of a head that are rotated, 2·a.
        base: base of the angles.
        scaling: how the angles are scaled; None: not at all.
        device: where the results are.
    """
    frequencies, factor = _frequencies(seq, width, base, scaling, device)
    angles = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def _frequencies(
    seq: int, width: int, base: float, scaling: RopeScaling | None, device: torch.device
) -> tuple[Tensor, float]:
    """Return two things: the angle in radians by which each pair of numbers of a head is rotated from one position to
    the next, [a] for a pairs, and the number by which cosines and sines are multiplied.
    """
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    frequencies = base**-exponents
    match scaling:
        case None:
            return frequencies, 1.0
        case LinearRope():
            return frequencies / scaling.factor, 1.0
        case Llama3Rope():
            turns = scaling.original_positions * frequencies / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            undivided = ((turns - low) / (high - low)).clamp(0, 1)
            return frequencies * (undivided + (1 - undivided) / scaling.factor), 1.0
        case YarnRope():
            undivided = 1 - _yarn_ramp(width, base, scaling, device)
            return frequencies * (undivided + (1 - undivided) / scaling.factor), scaling.effective_attention_factor
        case LongRope():
            factors = scaling.long_factor if seq > scaling.original_positions else scaling.short_factor
            return frequencies / torch.tensor(factors, device=device, dtype=torch.float32), scaling.attention_factor


def _yarn_ramp(width: int, base: float, scaling: YarnRope, device: torch.device) -> Tensor:
    """Return the weights [a] of the divided angles, from 0 for fast angles to 1 for slow ones. YaRN's angle is the
    weighted mean of the angle divided by `factor` and the undivided angle (Peng et al. 2023, section 3.2).
    """

    def index(turns: float) -> float:
        """Return the index, not rounded, of the angle that makes `turns` full turns over the `original_positions`
        positions."""
        return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low or 0.001
    return ((torch.arange(width // 2, device=device, dtype=torch.float32) - low) / span).clamp(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with each pair (x[i], x[i + a]) rotated by its angle; numbers of a head from 2·a on stay.

    Args:
        x: [batch, heads, seq, head_width], any dtype.
        cos: [seq, a], fp32.
        sin: [seq, a], fp32.
    """
    width = 2 * cos.shape[-1]
    low, high = x[..., :width].float().chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
    return rotated if x.shape[-1] == width else torch.cat((rotated, x[..., width:]), dim=-1)
