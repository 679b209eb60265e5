"""A decoder-only Transformer in the form of GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases."""

from __future__ import annotations

from torch import Tensor, nn

from hpctrain.model.biased_layers import BiasedAttention, GeluLayer, Positions
from hpctrain.model.norm import LayerNorm
from hpctrain.model.transformer_part import TransformerPart
from hpctrain.records.model.gpt2_spec import Gpt2Spec


class Gpt2Block(nn.Module):
    """One layer: attention and feed-forward layer, each after a norm and added to the residual stream."""

    def __init__(self, spec: Gpt2Spec) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(spec.dim, spec.norm_eps)
        self.attention = BiasedAttention(spec, causal=True)
        self.feed_forward_norm = LayerNorm(spec.dim, spec.norm_eps)
        self.feed_forward = GeluLayer(spec, "tanh")

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> [batch, seq, dim]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Gpt2(TransformerPart):
    """Blocks [start, stop), with embedding and positions in the first stage and norm and head in the last."""

    def __init__(self, spec: Gpt2Spec, start: int, stop: int, first: bool, last: bool) -> None:
        super().__init__()
        self.tied_here = spec.tied and last
        self.embedding = nn.Embedding(spec.vocabulary, spec.dim) if first or self.tied_here else None
        self.positions = Positions(spec.positions, spec.dim) if first else None
        self.layers = nn.ModuleDict({str(index): Gpt2Block(spec) for index in range(start, stop)})
        self.norm = LayerNorm(spec.dim, spec.norm_eps) if last else None
        self.head = nn.Linear(spec.dim, spec.vocabulary, bias=False) if last else None
        self.tie()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [batch, seq] (first) or activations [batch, seq, dim] in; activations or logits (last) out."""
        if self.embedding is not None and self.positions is not None:
            x = self.embedding(x) + self.positions(x)
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x
