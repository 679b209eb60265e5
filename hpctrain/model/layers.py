"""What several families share: norms, attention, feed-forward layers, positions, blocks, and the base classes of
stages.

In a stage, parts of the model may be absent, and the head may be tied to the embedding.

Shapes: activations x [batch, seq, dim], queries and keys [batch, heads, seq, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.records.model.block_stack import TransformerSpec
from hpctrain.records.model.families import BiasedSpec


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (Zhang & Sennrich 2019) over the last dimension, computed in fp32 for any input dtype."""

    eps: float

    def __init__(self, dim: int, eps: float, offset: bool = False) -> None:
        """Create the weight.

        Args:
            dim: width of the last dimension.
            eps: number added under the root.
            offset: whether x is multiplied by 1 + weight in place of weight.
        """
        super().__init__(dim, eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [..., dim], times the weight, in the dtype of x; without `offset`, in that to which
        torch promotes the dtypes of x and weight.
        """
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (scaled * (1.0 + self.weight.float())).to(x.dtype)
        return scaled.to(x.dtype) * self.weight


class LayerNorm(nn.LayerNorm):
    """Layer norm (Ba et al. 2016) over the last dimension, computed in fp32 for any input dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [..., dim], times the weight plus the bias, in the dtype of x."""
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)


class MultiHeadAttention(nn.Module):
    """The projections of multi-head attention (Vaswani et al. 2017); subclasses compute the attention between them."""

    def __init__(
        self, dim: int, head_dim: int, query_width: int, key_value_width: int | None = None, bias: bool = False
    ) -> None:
        """Create the projections.

        Args:
            dim: width of the residual stream.
            head_dim: width of one head.
            query_width: width of all query heads together.
            key_value_width: width of all key heads together, and of all value heads together; None: that of the
                queries.
            bias: whether the projections have biases.
        """
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, query_width, bias=bias)
        self.wk = nn.Linear(dim, key_value_width or query_width, bias=bias)
        self.wv = nn.Linear(dim, key_value_width or query_width, bias=bias)
        self.wo = nn.Linear(query_width, dim, bias=bias)

    def heads(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of x, and the keys and values of `memory` (None: of x): each [batch, heads, seq,
        head_dim].

        Args:
            x: [batch, seq, dim].
            memory: [batch, seq, dim].
        """
        memory = x if memory is None else memory
        return self._split(self.wq(x)), self._split(self.wk(memory)), self._split(self.wv(memory))

    def merged(self, heads: Tensor) -> Tensor:
        """Return the output [batch, seq, dim] of the last projection, from the heads' results [batch, heads, seq,
        head_dim].
        """
        return self.wo(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        # The number of heads follows from the width of the projections, so that a tensor-parallel part of them works
        # too.
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class PreNormBlock(nn.Module):
    """One block of the model: attention and feed-forward layer, each with a norm before it and a residual
    connection.
    """

    def __init__(
        self, make_norm: Callable[[], nn.Module], attention: nn.Module, feed_forward: nn.Module, parallel: bool = False
    ) -> None:
        """Create the block.

        Args:
            make_norm: returns a new norm.
            attention: the attention.
            feed_forward: the feed-forward layer.
            parallel: whether the feed-forward layer reads the block's input, as the attention does.
        """
        super().__init__()
        self.parallel = parallel
        self.attention_norm = make_norm()
        self.attention = attention
        self.feed_forward_norm = make_norm()
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, *added: Tensor) -> Tensor:
        """Return the block's output [batch, seq, dim].

        Args:
            x: [batch, seq, dim].
            added: tensors that the attention gets after the normed x, such as T5's bias of the scores.
        """
        attended = x + self.attention(self.attention_norm(x), *added)
        return attended + self.feed_forward(self.feed_forward_norm(x if self.parallel else attended))


class BiasedAttention(MultiHeadAttention):
    """Self-attention of GPT-2 and BERT, with a bias for every matrix."""

    def __init__(self, spec: BiasedSpec, causal: bool) -> None:
        super().__init__(spec.dim, spec.head_width, spec.dim, bias=True)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's output [batch, seq, dim] for activations x [batch, seq, dim]."""
        return self.merged(F.scaled_dot_product_attention(*self.heads(x), is_causal=self.causal))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu,
}  # fmt: skip
"""Name of an activation in a spec -> its function."""


class BiasedFeedForward(nn.Module):
    """Feed-forward layer w2(f(w1 x)). The activation f is GELU (Hendrycks & Gimpel 2016), exact or in its tanh form, or
    ReLU.
    """

    def __init__(self, spec: BiasedSpec, activation: Literal["gelu", "gelu_tanh", "relu"]) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.w1 = nn.Linear(spec.dim, spec.hidden)
        self.w2 = nn.Linear(spec.hidden, spec.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [batch, seq, dim] for activations x [batch, seq, dim]."""
        return self.w2(self.activation(self.w1(x)))


def token_embedding(spec: TransformerSpec) -> nn.Embedding:
    """Return the embedding of a model's tokens. The row of the padding token gets no gradient from inputs."""
    return nn.Embedding(spec.vocabulary, spec.dim, padding_idx=spec.padding_id)


class Positions(nn.Embedding):
    """Learned position embeddings: one vector per position of a sequence."""

    def __init__(self, spec: BiasedSpec, padding_id: int | None = None) -> None:
        super().__init__(spec.position_rows, spec.dim, padding_idx=padding_id)
        self.offset = spec.position_offset

    def forward(self, x: Tensor) -> Tensor:
        """Return the position embeddings [1, seq, dim] for tokens [batch, seq]."""
        return super().forward(torch.arange(self.offset, self.offset + x.shape[1], device=x.device)[None])


class TextPositions(Positions):
    """Learned position embeddings of RoBERTa (Liu et al. 2019).

    A token's position is its number among the tokens of its sequence that are not padding, counted from 1. Position n
    has row `padding_id` + n of the table. All padding tokens have row `padding_id`, which gets no gradient.
    """

    def __init__(self, spec: BiasedSpec) -> None:
        super().__init__(spec, spec.padding_id)

    def forward(self, x: Tensor) -> Tensor:
        """Return the position embeddings [batch, seq, dim] for tokens [batch, seq]."""
        assert self.padding_idx is not None, "only a model with a padding token has such positions"
        is_text = x.ne(self.padding_idx).long()
        return nn.Embedding.forward(self, is_text.cumsum(1) * is_text + self.padding_idx)


def relative_position_bias(table: nn.Embedding, x: Tensor, largest: int, causal: bool) -> Tensor:
    """Return T5's bias of attention scores, a learned number per head and range of distances: [1, heads, seq, seq].

    The bias is added to the attention scores. It is minus infinity where causal attention is masked.

    Args:
        table: [buckets, heads], of the encoder or the decoder.
        x: [batch, seq, dim]; only its shape is used.
        largest: distance from which on all distances share a bucket.
        causal: whether a position attends only to itself and earlier ones, as in the decoder.
    """
    seq = x.shape[1]
    # All scores of one distance get one number, so 2·seq − 1 look-ups are enough; shifted windows make a square of
    # them.
    distances = torch.arange(1 - seq, seq, device=x.device)
    numbers = table(relative_position_buckets(distances, table.num_embeddings, largest, causal)).t()
    if causal:
        numbers = numbers.masked_fill(distances > 0, -math.inf)
    return numbers.unfold(1, seq, 1).flip(1)[None]


def relative_position_buckets(distances: Tensor, count: int, largest: int, causal: bool) -> Tensor:
    """Return the bucket of each distance, a row of T5's table of relative positions (Raffel et al. 2020, section 2.1).

    Small distances have a bucket each. Larger distances share buckets on a logarithmic scale up to `largest`; all
    distances from `largest` on share one bucket. Without a causal mask, each direction gets half of the buckets.

    Args:
        distances: positions of the keys minus those of the queries, int64.
        count: number of buckets.
        largest: distance from which on all distances share a bucket.
        causal: whether only distances of 0 or less occur.
    """
    offset = torch.zeros_like(distances)
    if causal:
        away = (-distances).clamp(min=0)
    else:
        count //= 2
        offset, away = (distances > 0).long() * count, distances.abs()
    near = count // 2
    # Keep this order of operations: powers of two fall on the edge of two buckets, and published models use this order.
    far = near + (torch.log(away.clamp(min=1).float() / near) / math.log(largest / near) * (count - near)).long()
    return offset + torch.where(away < near, away, far.clamp(max=count - 1))


class StageBlocks(NamedTuple):
    """The blocks [start, stop) of a stage, and whether the stage is the first or the last one, which block numbers do
    not show for a stage without blocks.
    """

    start: int
    stop: int
    first: bool
    last: bool


class TransformerPart(nn.Module):
    """Base class of a stage of a built-in model: blocks [start, stop); the first stage also holds the embedding, the
    last one the head.

    Parameter names contain the global block number, so they do not depend on the cut. A tied head's matrix is always
    called embedding.weight; a last stage that is not the first holds a copy under that name.
    """

    embedding: nn.Embedding | None
    layers: nn.ModuleDict
    norm: nn.Module | None
    head: nn.Linear | None

    def __init__(self, spec: TransformerSpec, blocks: StageBlocks) -> None:
        super().__init__()
        self.first = blocks.first
        self.tied_here = spec.tied and blocks.last
        """Whether this stage has the head, and the head uses the embedding's matrix."""

    def tie(self) -> None:
        """Make a tied head use the embedding's parameter itself, in a stage that holds both and whose head is tied; do
        nothing in other stages.

        Call it again after anything that replaces parameters, such as moving them off the meta device or splitting them
        over devices.
        """
        if self.tied_here and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight


class DecoderPart(TransformerPart):
    """Base class of a stage of a decoder-only Transformer; the last stage has a norm and a head."""

    def __init__(
        self, spec: TransformerSpec, blocks: StageBlocks, make_block: Callable[[int], nn.Module],
        make_norm: Callable[[], nn.Module], positions: nn.Module | None = None,
    ) -> None:  # fmt: skip
        """Create the stage's modules.

        Args:
            spec: the model's spec.
            blocks: the stage's blocks, and whether it is the first or the last stage.
            make_block: returns a new block, given its number in the whole model.
            make_norm: returns a new norm.
            positions: module that takes tokens and returns what is added to their embedding; None: nothing is added.
        """
        super().__init__(spec, blocks)
        held = blocks.first or self.tied_here
        self.embedding = token_embedding(spec) if held else None
        self.positions = positions
        self.layers = nn.ModuleDict({str(index): make_block(index) for index in range(blocks.start, blocks.stop)})
        self.norm = make_norm() if blocks.last else None
        self.head = nn.Linear(spec.dim, spec.vocabulary, bias=False) if blocks.last else None
        self.tie()

    def forward(self, x: Tensor) -> Tensor:
        """Return activations [batch, seq, dim], or in the last stage logits [batch, seq, vocabulary].

        Args:
            x: tokens [batch, seq] in the first stage, else activations [batch, seq, dim].
        """
        if self.first and self.embedding is not None:
            x = self.embed(x, self.embedding)
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def embed(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Return the activations [batch, seq, dim] before the first block, for tokens [batch, seq]."""
        return embedding(tokens) if self.positions is None else embedding(tokens) + self.positions(tokens)
