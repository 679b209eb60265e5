"""Parts that several families share: the four matrices of attention, and a block with pre-norm.

Shapes: activations x [batch, seq, dim], queries and keys [batch, heads, seq, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    """The projections of multi-head attention (Vaswani et al. 2017)."""

    def __init__(
        self, dim: int, head_dim: int, query_width: int, key_value_width: int | None = None, bias: bool = False
    ) -> None:
        """
        Args:
            query_width: width of all query heads together.
            key_value_width: width of all key heads together, and of all value heads together; None: that of the
                queries.
        """
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, query_width, bias=bias)
        self.wk = nn.Linear(dim, key_value_width or query_width, bias=bias)
        self.wv = nn.Linear(dim, key_value_width or query_width, bias=bias)
        self.wo = nn.Linear(query_width, dim, bias=bias)

    def heads(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of x, and the keys and values of `memory`; without `memory`, those of x."""
        memory = x if memory is None else memory
        return self._split(self.wq(x)), self._split(self.wk(memory)), self._split(self.wv(memory))

    def merged(self, heads: Tensor) -> Tensor:
        """Project the heads' results [batch, heads, seq, head_dim] to [batch, seq, dim]."""
        return self.wo(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        # The number of heads follows from the width of the projections, so that a tensor-parallel part of them works
        # too.
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class PreNormBlock(nn.Module):
    """One layer of the model: attention and feed-forward layer, each with a norm before it and a residual
    connection.
    """

    def __init__(self, make_norm: Callable[[], nn.Module], attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = make_norm()
        self.attention = attention
        self.feed_forward_norm = make_norm()
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, *added: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> [batch, seq, dim].

        Args:
            added: further arguments of the attention.
        """
        x = x + self.attention(self.attention_norm(x), *added)
        return x + self.feed_forward(self.feed_forward_norm(x))
