"""A decoder-only Transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: tokens [batch, seq], activations x [batch, seq, dim], queries and keys [batch, heads, seq, head_dim].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.norm import RMSNorm
from hpctrain.model.transformer_part import TransformerPart
from hpctrain.records.model.decoder_spec import DecoderSpec


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al. 2021) and shared key/value heads (Ainslie et al. 2023)."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.rope_base = spec.rope_base
        key_value = spec.key_value_heads * spec.head_dim
        self.wq = nn.Linear(spec.dim, spec.dim, bias=False)
        self.wk = nn.Linear(spec.dim, key_value, bias=False)
        self.wv = nn.Linear(spec.dim, key_value, bias=False)
        self.wo = nn.Linear(spec.dim, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> [batch, seq, dim]."""
        batch, seq, _ = x.shape
        # The number of heads follows from the width of the projections, so that a tensor-parallel share works too.
        q, k, v = (w(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        angles = rotary_angles(seq, self.head_dim, self.rope_base, x.device)
        q, k = rotate(q, *angles), rotate(k, *angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer 2020): w2(silu(w1 x) · w3 x)."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.w1 = nn.Linear(spec.dim, spec.hidden, bias=False)
        self.w3 = nn.Linear(spec.dim, spec.hidden, bias=False)
        self.w2 = nn.Linear(spec.hidden, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> [batch, seq, dim]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: attention and SwiGLU, each after a norm and added to the residual stream."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.attention = Attention(spec)
        self.feed_forward_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.feed_forward = SwiGLU(spec)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> [batch, seq, dim]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(TransformerPart):
    """Blocks [start, stop) of a decoder, with the embedding in the first stage and norm and head in the last."""

    def __init__(self, spec: DecoderSpec, start: int, stop: int, first: bool, last: bool) -> None:
        super().__init__()
        self.first = first
        self.tied_here = spec.tied and last
        self.embedding = nn.Embedding(spec.vocabulary, spec.dim) if first or self.tied_here else None
        self.layers = nn.ModuleDict({str(index): Block(spec) for index in range(start, stop)})
        self.norm = RMSNorm(spec.dim, spec.norm_eps) if last else None
        self.head = nn.Linear(spec.dim, spec.vocabulary, bias=False) if last else None
        self.tie()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [batch, seq] (first) or activations [batch, seq, dim] in; activations or logits (last) out."""
        if self.first and self.embedding is not None:
            x = self.embedding(x)
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def rotary_angles(seq: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [seq, head_dim / 2] of the rotary positions, in fp32."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), base**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim/2]) by their angles. x: [batch, heads, seq, head_dim], any dtype."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
