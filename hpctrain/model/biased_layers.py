"""Attention and feed-forward layer of GPT-2 and BERT, with GELU and a bias for every matrix.

Shapes: activations x [batch, seq, dim], queries and keys [batch, heads, seq, head_dim].
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.blocks import MultiHeadAttention
from hpctrain.records.model.biased_spec import BiasedSpec


class BiasedAttention(MultiHeadAttention):
    """Self-attention with biases."""

    def __init__(self, spec: BiasedSpec, causal: bool) -> None:
        super().__init__(spec.dim, spec.head_dim, spec.dim, bias=True)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> [batch, seq, dim]."""
        return self.merged(F.scaled_dot_product_attention(*self.heads(x), is_causal=self.causal))


class GeluLayer(nn.Module):
    """Feed-forward layer w2(GELU(w1 x)) (Hendrycks & Gimpel 2016), exact or in the tanh approximation."""

    def __init__(self, spec: BiasedSpec, form: Literal["none", "tanh"]) -> None:
        super().__init__()
        self.form = form
        self.w1 = nn.Linear(spec.dim, spec.hidden)
        self.w2 = nn.Linear(spec.hidden, spec.dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> [batch, seq, dim]."""
        return self.w2(F.gelu(self.w1(x), approximate=self.form))


class Positions(nn.Embedding):
    """Learned position embeddings: one vector per position of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the position embeddings [1, seq, dim] for tokens [batch, seq]."""
        return super().forward(torch.arange(x.shape[1], device=x.device)[None])
