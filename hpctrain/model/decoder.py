"""Decoder-only Transformers, in the form of Llama and of GPT-2.

Shapes: tokens [batch, seq], activations x [batch, seq, dim], queries and keys [batch, heads, seq, head_dim].
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.layers import (
    BiasedAttention,
    DecoderPart,
    GeluLayer,
    LayerNorm,
    MultiHeadAttention,
    Positions,
    PreNormBlock,
    RMSNorm,
    StageBlocks,
)
from hpctrain.records.model.families import DecoderSpec, Gpt2Spec


class Attention(MultiHeadAttention):
    """Causal self-attention with rotary positions (Su et al. 2021), in which query heads may share key and value heads
    (Ainslie et al. 2023).
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec.dim, spec.head_dim, spec.dim, spec.key_value_heads * spec.head_dim)
        self.rope_base = spec.rope_base

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's output [batch, seq, dim] for activations x [batch, seq, dim]."""
        q, k, v = self.heads(x)
        angles = rotary_angles(x.shape[1], self.head_dim, self.rope_base, x.device)
        q, k = rotate(q, *angles), rotate(k, *angles)
        return self.merged(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]))


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer 2020): w2(silu(w1 x) · w3 x)."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.w1 = nn.Linear(spec.dim, spec.hidden, bias=False)
        self.w3 = nn.Linear(spec.dim, spec.hidden, bias=False)
        self.w2 = nn.Linear(spec.hidden, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [batch, seq, dim] for activations x [batch, seq, dim]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Decoder(DecoderPart):
    """Blocks [start, stop) of a decoder in the form of Llama; the first stage also has the embedding, the last stage
    norm and head.

    It has RMSNorm, rotary positions, grouped-query attention and SwiGLU.
    """

    def __init__(self, spec: DecoderSpec, blocks: StageBlocks) -> None:
        norm = partial(RMSNorm, spec.dim, spec.norm_eps)
        super().__init__(spec, blocks, lambda: PreNormBlock(norm, Attention(spec), SwiGLU(spec)), norm)


def rotary_angles(seq: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles of rotary positions (Su et al. 2021): [seq, head_dim / 2] each, in
    fp32.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), base**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with each pair (x[i], x[i + head_dim/2]) rotated by its angle (rotary positions, Su et al. 2021).

    Args:
        x: [batch, heads, seq, head_dim], any dtype.
        cos: [seq, head_dim / 2], fp32.
        sin: [seq, head_dim / 2], fp32.
    """
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Gpt2(DecoderPart):
    """Blocks [start, stop) of GPT-2; the first stage also has embedding and positions, the last stage norm and head.

    GPT-2 (Radford et al. 2019) has learned positions, LayerNorm, GELU and biases.
    """

    def __init__(self, spec: Gpt2Spec, blocks: StageBlocks) -> None:
        norm = partial(LayerNorm, spec.dim, spec.norm_eps)
        super().__init__(
            spec,
            blocks,
            lambda: PreNormBlock(norm, BiasedAttention(spec, causal=True), GeluLayer(spec, "tanh")),
            norm,
            Positions(spec.positions, spec.dim) if blocks.first else None,
        )
