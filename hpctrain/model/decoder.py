"""Decoder-only Transformers, in the form of Llama and its successors, and of GPT-2.

Shapes: tokens [batch, seq], activations x [batch, seq, dim], queries and keys [batch, heads, seq, head_width].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.layers import (
    ACTIVATIONS,
    BiasedAttention,
    BiasedFeedForward,
    DecoderPart,
    LayerNorm,
    MultiHeadAttention,
    Positions,
    PreNormBlock,
    RMSNorm,
    StageBlocks,
)
from hpctrain.model.rotary import rotary_angles, rotate
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.families import Gpt2Spec


class Attention(MultiHeadAttention):
    """Causal self-attention with rotary positions (Su et al. 2021), in which query heads may share key and value heads
    (Ainslie et al. 2023).

    The spec may add biases, a norm of queries and keys, a sliding window, and a soft cap of the scores.
    """

    def __init__(self, spec: DecoderSpec, block: int) -> None:
        """Create the modules.

        Args:
            spec: the model's spec.
            block: number of the block, on which the window depends.
        """
        query, key_value = spec.query_width, spec.key_value_width
        super().__init__(spec.dim, spec.head_width, query, key_value, spec.attention_bias != "none")
        if spec.attention_bias == "qkv":
            self.wo = nn.Linear(query, spec.dim, bias=False)
        self.qk_norm = spec.qk_norm
        if spec.qk_norm != "none":
            widths = (query, key_value) if spec.qk_norm == "width" else (spec.head_width, spec.head_width)
            self.q_norm, self.k_norm = (RMSNorm(width, spec.norm_eps, spec.norm_offset) for width in widths)
        self.window, self.score_cap = spec.block_window(block), spec.score_cap
        self.rope_base, self.rope_scaling = spec.block_rope(block)
        self.rotary_width = spec.rotary_width
        self.scale = None if spec.score_width is None else spec.score_width**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's output [batch, seq, dim] for activations x [batch, seq, dim]."""
        if self.qk_norm == "width":
            q, k, v = (
                self._split(self.q_norm(self.wq(x))),
                self._split(self.k_norm(self.wk(x))),
                self._split(self.wv(x)),
            )
        else:
            q, k, v = self.heads(x)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        angles = rotary_angles(x.shape[1], self.rotary_width, self.rope_base, self.rope_scaling, x.device)
        q, k = rotate(q, *angles), rotate(k, *angles)
        return self.merged(causal_attention(q, k, v, self.scale, self.window, self.score_cap))


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int | None = None, cap: float | None = None
) -> Tensor:
    """Return the results [batch, heads, seq, head_width] of attention to the own and earlier positions.

    With a window shorter than the sequence, scores outside of it are computed, too, and masked. With a cap, scores are
    held in memory, because torch's fused attention has no cap.

    Args:
        q: queries [batch, heads, seq, head_width].
        k: keys [batch, key heads, seq, head_width]; the number of query heads is a multiple of that of key heads.
        v: values, of the same shape as k.
        scale: number by which scores are multiplied; None: 1/√head_width.
        window: number of positions, the own included, that a position sees; None: all earlier ones.
        cap: soft cap of scores; None: there is none.
    """
    seq, groups = q.shape[2], q.shape[1] // k.shape[1]
    if cap is None and (window is None or window >= seq):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups > 1)
    if groups > 1:  # of torch's fused kernels, those that take a mask want as many keys as queries
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    away = torch.arange(seq, device=q.device)[:, None] - torch.arange(seq, device=q.device)
    visible = (away >= 0) & (away < (window or seq))
    if cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    scores = (q * (scale or q.shape[3] ** -0.5)) @ k.transpose(2, 3)
    scores = (cap * torch.tanh(scores / cap)).masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


class GatedLayer(nn.Module):
    """Gated feed-forward layer (Shazeer 2020): w2(activation(w1 x) · w3 x)."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.w1 = nn.Linear(spec.dim, spec.hidden, bias=False)
        self.w3 = nn.Linear(spec.dim, spec.hidden, bias=False)
        self.w2 = nn.Linear(spec.hidden, spec.dim, bias=False)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [batch, seq, dim] for activations x [batch, seq, dim]."""
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class OutputNormBlock(nn.Module):
    """One block of the model, in which the outputs of attention and feed-forward layer are normed before they are added
    to the residual stream; their inputs may be normed, too.
    """

    def __init__(
        self, make_norm: Callable[[], nn.Module], attention: nn.Module, feed_forward: nn.Module, inputs: bool
    ) -> None:
        """Create the modules.

        Args:
            make_norm: returns a new norm.
            attention: the attention.
            feed_forward: the feed-forward layer.
            inputs: whether the inputs are normed, too.
        """
        super().__init__()
        self.attention_norm = make_norm() if inputs else None
        self.attention = attention
        self.attention_output_norm = make_norm()
        self.feed_forward_norm = make_norm() if inputs else None
        self.feed_forward = feed_forward
        self.feed_forward_output_norm = make_norm()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [batch, seq, dim] for x [batch, seq, dim]."""
        y = x if self.attention_norm is None else self.attention_norm(x)
        x = x + self.attention_output_norm(self.attention(y))
        y = x if self.feed_forward_norm is None else self.feed_forward_norm(x)
        return x + self.feed_forward_output_norm(self.feed_forward(y))


class Decoder(DecoderPart):
    """Blocks [start, stop) of a decoder in the form of Llama; the first stage also has the embedding, the last stage
    norm and head.

    It has RMSNorm, rotary positions, grouped-query attention and a gated feed-forward layer.
    """

    def __init__(self, spec: DecoderSpec, blocks: StageBlocks) -> None:
        norm = partial(RMSNorm, spec.dim, spec.norm_eps, spec.norm_offset)

        def block(number: int) -> nn.Module:
            parts = Attention(spec, number), GatedLayer(spec)
            if spec.norms == "before":
                return PreNormBlock(norm, *parts)
            return OutputNormBlock(norm, *parts, inputs=spec.norms == "both")

        super().__init__(spec, blocks, block, norm)
        self.embedding_scale = spec.dim**0.5 if spec.embedding_scaled else None
        self.logit_cap = spec.logit_cap

    def embed(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Return the embeddings [batch, seq, dim] of tokens [batch, seq]."""
        x = super().embed(tokens, embedding)
        # Rounded to the dtype of the numbers as in the published models.
        return x if self.embedding_scale is None else x * torch.tensor(self.embedding_scale, dtype=x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return activations or logits as the base class does, the logits with the model's soft cap."""
        x = super().forward(x)
        if self.logit_cap is None or self.head is None:
            return x
        return self.logit_cap * torch.tanh(x / self.logit_cap)


class RotaryBiasedAttention(BiasedAttention):
    """Causal self-attention of GPT-NeoX, with a bias for every matrix and rotary positions."""

    def __init__(self, spec: Gpt2Spec) -> None:
        super().__init__(spec, causal=True)
        self.rotary_dim, self.rope_base = spec.rotary_dim or spec.head_width, spec.rope_base

    def heads(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as the base class does, queries and keys rotated by their positions."""
        q, k, v = super().heads(x, memory)
        angles = rotary_angles(x.shape[1], self.rotary_dim, self.rope_base, None, x.device)
        return rotate(q, *angles), rotate(k, *angles), v


class Gpt2(DecoderPart):
    """Blocks [start, stop) of a GPT-2, OPT or GPT-NeoX; the first stage also has the embedding and learned positions,
    the last stage norm and head.

    These models have LayerNorm and biases.
    """

    def __init__(self, spec: Gpt2Spec, blocks: StageBlocks) -> None:
        norm = partial(LayerNorm, spec.dim, spec.norm_eps)

        def block(_: int) -> PreNormBlock:
            plain = spec.rotary_dim is None
            attention = BiasedAttention(spec, causal=True) if plain else RotaryBiasedAttention(spec)
            return PreNormBlock(norm, attention, BiasedFeedForward(spec, spec.activation), spec.parallel_residual)

        super().__init__(
            spec,
            blocks,
            block,
            norm,
            Positions(spec) if blocks.first and spec.rotary_dim is None else None,
        )
