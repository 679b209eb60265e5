"""An encoder-decoder Transformer in the form of T5 (Raffel et al. 2020; v1.1 with gated GELU).

Shapes: tokens [batch, seq], decoder tokens [batch, target], encoder stream [batch, seq, dim]. From the first decoder
block on, both streams are concatenated along the sequence, [batch, seq + target, dim], so that a stage message is one
tensor at every cut.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.norm import RMSNorm
from hpctrain.model.relative_positions import relative_position_bias
from hpctrain.model.transformer_part import TransformerPart
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec


class T5Attention(nn.Module):
    """Attention whose scores are not divided by the root of the head width: T5's initial weights are smaller."""

    def __init__(self, spec: EncoderDecoderSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_width
        self.wq = nn.Linear(spec.dim, spec.inner, bias=False)
        self.wk = nn.Linear(spec.dim, spec.inner, bias=False)
        self.wv = nn.Linear(spec.dim, spec.inner, bias=False)
        self.wo = nn.Linear(spec.inner, spec.dim, bias=False)

    def forward(self, x: Tensor, added: Tensor | None, memory: Tensor | None = None) -> Tensor:
        """x: [batch, target, dim] -> [batch, target, dim].

        Args:
            added: [1, heads, target, seq], added to the scores.
            memory: [batch, seq, dim], the input of keys and values; None: x itself.
        """
        memory = x if memory is None else memory
        q, k, v = self._heads(self.wq(x)), self._heads(self.wk(memory)), self._heads(self.wv(memory))
        if added is not None:
            added = added.to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=1.0)
        return self.wo(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class T5FeedForward(nn.Module):
    """w2(ReLU(w1 x)) or, gated, w2(GELU(w1 x) · w3 x) (Shazeer 2020)."""

    def __init__(self, spec: EncoderDecoderSpec) -> None:
        super().__init__()
        self.w1 = nn.Linear(spec.dim, spec.hidden, bias=False)
        self.w3 = nn.Linear(spec.dim, spec.hidden, bias=False) if spec.gated else None
        self.w2 = nn.Linear(spec.hidden, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> [batch, seq, dim]."""
        if self.w3 is None:
            return self.w2(F.relu(self.w1(x)))
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class T5EncoderBlock(nn.Module):
    """A layer of the encoder."""

    def __init__(self, spec: EncoderDecoderSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.attention = T5Attention(spec)
        self.feed_forward_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.feed_forward = T5FeedForward(spec)

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        """x: [batch, seq, dim], added (to the scores): [1, heads, seq, seq] -> [batch, seq, dim]."""
        x = x + self.attention(self.attention_norm(x), added)
        return x + self.feed_forward(self.feed_forward_norm(x))


class T5DecoderBlock(nn.Module):
    """A layer of the decoder."""

    def __init__(self, spec: EncoderDecoderSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.attention = T5Attention(spec)
        self.cross_attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.cross_attention = T5Attention(spec)
        self.feed_forward_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.feed_forward = T5FeedForward(spec)

    def forward(self, x: Tensor, added: Tensor, memory: Tensor) -> Tensor:
        """x: [batch, target, dim], added (to the scores): [1, heads, target, target], memory (the encoder's output):
        [batch, seq, dim] -> [batch, target, dim]."""
        x = x + self.attention(self.attention_norm(x), added)
        x = x + self.cross_attention(self.cross_attention_norm(x), None, memory)
        return x + self.feed_forward(self.feed_forward_norm(x))


class EncoderDecoder(TransformerPart):
    """Blocks [start, stop) of encoder and decoder; the decoder's blocks are numbered after the encoder's.

    The stage with the first decoder block also holds the encoder's last norm and the embedding of the decoder's tokens,
    which is a copy of the first stage's if the model is cut.
    """

    def __init__(self, spec: EncoderDecoderSpec, start: int, stop: int, first: bool, last: bool) -> None:
        super().__init__()
        seam = spec.seam
        self.first = first
        self.max_distance = spec.max_distance
        self.tied_here = spec.tied and last
        self.logit_scale = spec.dim**-0.5 if spec.tied else 1.0
        cut_at_seam = start <= seam < stop
        self.embedding = nn.Embedding(spec.vocabulary, spec.dim) if first or cut_at_seam or self.tied_here else None
        self.relative_encoder = nn.Embedding(spec.buckets, spec.heads) if start < min(stop, seam) else None
        self.encoder_norm = RMSNorm(spec.dim, spec.norm_eps) if cut_at_seam else None
        self.relative_decoder = nn.Embedding(spec.buckets, spec.heads) if max(start, seam) < stop else None
        blocks = {index: T5EncoderBlock(spec) if index < seam else T5DecoderBlock(spec) for index in range(start, stop)}
        self.layers = nn.ModuleDict({str(index): block for index, block in blocks.items()})
        self.norm = RMSNorm(spec.dim, spec.norm_eps) if last else None
        self.head = nn.Linear(spec.dim, spec.vocabulary, bias=False) if last else None
        self.sources = [str(index) for index in blocks if index < seam]
        self.targets = [str(index) for index in blocks if index >= seam]
        self.tie()

    def forward(self, x: Tensor, decoder_tokens: Tensor) -> Tensor:
        """Tokens (first), encoder stream or both streams in; encoder stream, both streams or logits (last) out.

        Args:
            decoder_tokens: [batch, target], the same in every stage.
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
