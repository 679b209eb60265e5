"""Encoder-only Transformers in the form of BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019), with the head that
predicts masked tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.layers import (
    BiasedAttention,
    BiasedFeedForward,
    LayerNorm,
    Positions,
    StageBlocks,
    TextPositions,
    TransformerPart,
    token_embedding,
)
from hpctrain.records.model.families import EncoderSpec


class EncoderBlock(nn.Module):
    """One block of an encoder: attention and feed-forward layer, each with a residual connection and then a norm."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.attention = BiasedAttention(spec, causal=False)
        self.attention_norm = LayerNorm(spec.dim, spec.norm_eps)
        self.feed_forward = BiasedFeedForward(spec, "gelu")
        self.feed_forward_norm = LayerNorm(spec.dim, spec.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [batch, seq, dim] for activations x [batch, seq, dim]."""
        x = self.attention_norm(x + self.attention(x))
        return self.feed_forward_norm(x + self.feed_forward(x))


class FirstSegment(nn.Embedding):
    """Segment embeddings for inputs of one segment: every position gets the embedding of the first segment."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the segment embeddings [1, seq, dim] for tokens [batch, seq]."""
        return super().forward(torch.zeros(1, x.shape[1], dtype=torch.long, device=x.device))


class Encoder(TransformerPart):
    """Blocks [start, stop) of an encoder; the first stage also has the embeddings, the last stage the head."""

    def __init__(self, spec: EncoderSpec, blocks: StageBlocks) -> None:
        super().__init__(spec, blocks)
        _, _, first, last = blocks
        self.norm = None  # each block ends with a norm
        self.embedding = token_embedding(spec) if first or self.tied_here else None
        positions = TextPositions if spec.position_offset else Positions
        self.positions = positions(spec) if first else None
        self.segments = FirstSegment(spec.segments, spec.dim) if first else None
        self.embedding_norm = LayerNorm(spec.dim, spec.norm_eps) if first else None
        self.layers = nn.ModuleDict({str(index): EncoderBlock(spec) for index in range(blocks.start, blocks.stop)})
        self.transform = nn.Linear(spec.dim, spec.dim) if last else None
        self.transform_norm = LayerNorm(spec.dim, spec.norm_eps) if last else None
        self.head = nn.Linear(spec.dim, spec.vocabulary) if last else None
        self.tie()

    def forward(self, x: Tensor) -> Tensor:
        """Return activations [batch, seq, dim], or in the last stage logits [batch, seq, vocabulary].

        Args:
            x: tokens [batch, seq] in the first stage, else activations [batch, seq, dim].
        """
        if self.embedding is not None and self.embedding_norm is not None:
            assert self.positions is not None, "a first stage has all of the front"
            assert self.segments is not None, "a first stage has all of the front"
            x = self.embedding_norm(self.embedding(x) + self.positions(x) + self.segments(x))
        for block in self.layers.values():
            x = block(x)
        if self.head is not None and self.transform is not None and self.transform_norm is not None:
            x = self.head(self.transform_norm(F.gelu(self.transform(x))))
        return x
