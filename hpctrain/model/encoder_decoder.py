"""An encoder-decoder Transformer in the form of T5 (Raffel et al. 2020; v1.1 with gated GELU).

Shapes: tokens [batch, seq], decoder tokens [batch, target], encoder stream [batch, seq, dim]. From the first decoder
block on, both streams are concatenated along the sequence, [batch, seq + target, dim], so that a stage message is one
tensor at every cut.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.layers import (
    MultiHeadAttention,
    PreNormBlock,
    RMSNorm,
    StageBlocks,
    TransformerPart,
    relative_position_bias,
    token_embedding,
)
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec


class T5Attention(MultiHeadAttention):
    """Attention whose scores are not divided by the root of the head width: T5 divides the initial query weights by it
    instead.
    """

    def __init__(self, spec: EncoderDecoderSpec) -> None:
        super().__init__(spec.dim, spec.head_width, spec.inner)

    def forward(self, x: Tensor, added: Tensor | None, memory: Tensor | None = None) -> Tensor:
        """Return the attention's output [batch, target, dim].

        Args:
            x: [batch, target, dim], the input of queries.
            added: [1, heads, target, seq], added to the scores; None: nothing is added.
            memory: [batch, seq, dim], the input of keys and values; None: x itself.
        """
        q, k, v = self.heads(x, memory)
        if added is not None:
            added = added.to(q.dtype)
        return self.merged(F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=1.0))


class T5FeedForward(nn.Module):
    """Feed-forward layer of T5: w2(ReLU(w1 x)), or with a gate w2(GELU(w1 x) · w3 x) (Shazeer 2020)."""

    def __init__(self, spec: EncoderDecoderSpec) -> None:
        super().__init__()
        self.w1 = nn.Linear(spec.dim, spec.hidden, bias=False)
        self.w3 = nn.Linear(spec.dim, spec.hidden, bias=False) if spec.gated else None
        self.w2 = nn.Linear(spec.hidden, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [batch, seq, dim] for activations x [batch, seq, dim]."""
        if self.w3 is None:
            return self.w2(F.relu(self.w1(x)))
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


def _encoder_block(spec: EncoderDecoderSpec) -> PreNormBlock:
    """Return a block of the encoder. Its `forward` takes activations and what is added to the scores, [1, heads, seq,
    seq].
    """
    return PreNormBlock(lambda: RMSNorm(spec.dim, spec.norm_eps), T5Attention(spec), T5FeedForward(spec))


class T5DecoderBlock(nn.Module):
    """One block of the decoder: self-attention, attention to the encoder's output, and feed-forward layer."""

    def __init__(self, spec: EncoderDecoderSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.attention = T5Attention(spec)
        self.cross_attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.cross_attention = T5Attention(spec)
        self.feed_forward_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.feed_forward = T5FeedForward(spec)

    def forward(self, x: Tensor, added: Tensor, memory: Tensor) -> Tensor:
        """Return the block's output, the new decoder stream [batch, target, dim].

        Args:
            x: [batch, target, dim], the decoder stream.
            added: [1, heads, target, target], added to the scores of the self-attention.
            memory: [batch, seq, dim], the encoder's output.
        """
        x = x + self.attention(self.attention_norm(x), added)
        x = x + self.cross_attention(self.cross_attention_norm(x), None, memory)
        return x + self.feed_forward(self.feed_forward_norm(x))


class EncoderDecoder(TransformerPart):
    """Blocks [start, stop) of an encoder-decoder; the decoder's blocks are numbered after the encoder's.

    The first stage also holds the embedding, the last stage norm and head. The stage with the first decoder block also
    holds the encoder's last norm and the embedding of the decoder's tokens. If that stage is not the first, its
    embedding is a copy of the first stage's.
    """

    def __init__(self, spec: EncoderDecoderSpec, blocks: StageBlocks) -> None:
        super().__init__(spec, blocks)
        (start, stop, first, last), seam = blocks, spec.seam
        self.max_distance = spec.max_distance
        self.logit_scale = spec.dim**-0.5 if spec.tied else 1.0
        cut_at_seam = start <= seam < stop
        self.embedding = token_embedding(spec) if first or cut_at_seam or self.tied_here else None
        self.relative_encoder = nn.Embedding(spec.buckets, spec.heads) if start < min(stop, seam) else None
        self.encoder_norm = RMSNorm(spec.dim, spec.norm_eps) if cut_at_seam else None
        self.relative_decoder = nn.Embedding(spec.buckets, spec.heads) if max(start, seam) < stop else None
        numbers = range(start, stop)
        self.layers = nn.ModuleDict(
            {str(number): _encoder_block(spec) if number < seam else T5DecoderBlock(spec) for number in numbers}
        )
        self.norm = RMSNorm(spec.dim, spec.norm_eps) if last else None
        self.head = nn.Linear(spec.dim, spec.vocabulary, bias=False) if last else None
        self.sources = [str(number) for number in numbers if number < seam]
        self.targets = [str(number) for number in numbers if number >= seam]
        self.tie()

    def forward(self, x: Tensor, decoder_tokens: Tensor) -> Tensor:
        """Return the stage's output: the encoder stream, both streams concatenated, or in the last stage logits [batch,
        target, vocabulary].

        Args:
            x: tokens [batch, seq] in the first stage, else the encoder stream [batch, seq, dim] or both streams [batch,
                seq + target, dim].
            decoder_tokens: [batch, target], equal in every stage.
        """
        if self.first and self.embedding is not None:
            x = self.embedding(x)
        if self.relative_encoder is not None:
            added = relative_position_bias(self.relative_encoder, x, self.max_distance, causal=False)
            for name in self.sources:
                x = self.layers[name](x, added)
        if self.encoder_norm is not None and self.embedding is not None:
            x = torch.cat((self.encoder_norm(x), self.embedding(decoder_tokens)), dim=1)
        if self.relative_decoder is None and self.head is None:
            return x
        target = decoder_tokens.shape[1]
        memory, stream = x.split((x.shape[1] - target, target), dim=1)
        if self.relative_decoder is not None:
            added = relative_position_bias(self.relative_decoder, stream, self.max_distance, causal=True)
            for name in self.targets:
                stream = self.layers[name](stream, added, memory)
        if self.norm is not None and self.head is not None:
            return self.head(self.norm(stream) * self.logit_scale)
        return torch.cat((memory, stream), dim=1)
