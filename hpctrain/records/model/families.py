"""The model families that hpctrain builds, as `model.dims` of a run file names them: GPT-2 and BERT, with the presets
of all families. The decoder like Llama is in `decoder_spec`, the encoder-decoder in `encoder_decoder_spec`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from hpctrain.records.format.document import SEQ_MAX, WIDTH_MAX
from hpctrain.records.model.block_stack import EqualBlocks, require_family
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec


class BiasedSpec(EqualBlocks):
    """Base class of GPT-2 and BERT: Transformers with biases and learned positions. The matrices of a block have
    4 d² + 2 d·f weights (d: `dim`, f: `ffn_dim`)."""

    ffn_dim: int | None = Field(default=None, ge=1, le=WIDTH_MAX)
    """Width inside the feed-forward layer. Default: 4 times `dim`."""
    tied: bool = True
    """Whether the head uses the embedding's matrix."""
    positions: int = Field(ge=1, le=SEQ_MAX)
    """Number of learned positions, which is the length of the longest sequence in tokens."""
    position_offset: int = Field(default=0, ge=0, le=SEQ_MAX)
    """Number of rows of the table of positions before the row of a sequence's first token."""
    norm_eps: float = Field(gt=0)
    """Number added to the variance in LayerNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @property
    def hidden(self) -> int:
        return self.ffn_dim or 4 * self.dim

    @property
    def position_rows(self) -> int:
        """Return the number of rows of the table of positions."""
        return self.positions + self.position_offset

    @property
    def block_weights(self) -> int:
        return 4 * self.dim * self.dim + 2 * self.dim * self.hidden

    @property
    def attention_share(self) -> float:
        return 4 * self.dim * self.dim / self.block_weights

    def sequence_length_error(self, seq_len: int) -> str | None:
        if seq_len <= self.positions:
            return None
        return f"the model has {self.positions} positions (model.dims.positions)"

    def block_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters that one of `tp` devices holds of one block. Every device holds whole norms,
        and whole biases that are added to the residual stream."""
        return (self.block_weights + 3 * self.dim + self.hidden) // tp + 6 * self.dim

    def split_values(self, seq_len: int) -> tuple[int, int]:
        """Return two counts of numbers per token in those tensors of a block that tensor parallelism splits, over all
        devices together: (all numbers that the backward pass needs; those of them that are results of matrix products
        or attention).

        Queries, keys, values and attention output have 4·d numbers, the input of the GELU has f (d: `dim`, f: width
        of the feed-forward layer). The output of the GELU has f numbers, too, but is no result of a matrix product.
        """
        return 4 * self.dim + 2 * self.hidden, 4 * self.dim + self.hidden


class Gpt2Spec(BiasedSpec):
    """A decoder-only Transformer with biases like GPT-2 (Radford et al. 2019), and the settings by which OPT (Zhang et
    al. 2022) and GPT-NeoX (Black et al. 2022) differ from it. The defaults are GPT-2's: LayerNorm before each attention
    and feed-forward layer, GELU in its tanh form, learned positions."""

    model_config = ConfigDict(json_schema_extra=require_family)

    family: Literal["gpt2"] = "gpt2"
    """The kind of Transformer."""
    positions: int = Field(default=1024, ge=1, le=SEQ_MAX)
    """Number of learned positions, which is the length of the longest sequence in tokens. With `rotary_dim` it has no
    meaning."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Number added to the variance in LayerNorm."""
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh"
    """Activation in the feed-forward layer: GELU in its tanh form (GPT-2), exact GELU (GPT-NeoX), or ReLU (OPT)."""
    parallel_residual: bool = False
    """Whether attention and feed-forward layer both read the input of the block, and both outputs are added to it
    (GPT-NeoX). Default: the feed-forward layer reads the sum of input and attention."""
    rotary_dim: int | None = Field(default=None, ge=2, le=WIDTH_MAX)
    """Numbers of each head that are rotated by position, from the first on, in place of learned positions (GPT-NeoX).
    Default: learned positions."""
    rope_base: float = Field(default=10_000.0, gt=1)
    """Base of the rotary position angles (Su et al. 2021)."""

    later_fields = frozenset({"position_offset", "activation", "parallel_residual", "rotary_dim", "rope_base"})

    @model_validator(mode="after")
    def _check(self) -> Gpt2Spec:
        if self.rotary_dim is None:
            return self
        if self.rotary_dim % 2 or self.rotary_dim > self.head_width:
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}; allowed: even numbers up to the width of a head, {self.head_width}"
            )
        if self.position_offset:
            raise ValueError("position_offset belongs to learned positions; leave it out with rotary_dim")
        return self

    @property
    def position_rows(self) -> int:
        return 0 if self.rotary_dim is not None else super().position_rows

    def sequence_length_error(self, seq_len: int) -> str | None:
        return None if self.rotary_dim is not None else super().sequence_length_error(seq_len)

    @property
    def norm_values(self) -> int:
        return (3 if self.parallel_residual else 4) * self.dim

    def split_values(self, seq_len: int) -> tuple[int, int]:
        backward, results = super().split_values(seq_len)
        # The backward pass of a ReLU needs only its output. The attention output of rotated queries lies in memory by
        # heads, so that the last projection keeps a copy of it.
        rotated = self.dim * (self.rotary_dim is not None)
        return backward + rotated - self.hidden * (self.activation == "relu"), results

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters that one of `tp` devices holds of a stage outside its blocks: of embedding
        and positions in the `first` stage, of the last norm and the head in the `last` stage."""
        tables = self.tables(first, last) * self.embedding_parameters() // self.head_shards(tp)
        return tables + self.position_rows * self.dim * first + 2 * self.dim * last


class EncoderSpec(BiasedSpec):
    """An encoder-only Transformer like BERT (Devlin et al. 2019) or RoBERTa (Liu et al. 2019): LayerNorm after each
    attention and feed-forward layer, GELU, and a head with a matrix, a GELU and a norm before the output embedding."""

    hidden_by_mask = 0.0

    model_config = ConfigDict(json_schema_extra=require_family)

    family: Literal["encoder"] = "encoder"
    """The kind of Transformer."""
    positions: int = Field(default=512, ge=1, le=SEQ_MAX)
    """Number of learned positions, which is the length of the longest sequence in tokens."""
    position_offset: int = Field(default=0, ge=0, le=SEQ_MAX)
    """Number of rows of the table of positions before the row of a sequence's first token. RoBERTa has `padding_id` + 1
    such rows, and does not count padding tokens as positions: they get the last of these rows. BERT has 0."""
    segments: int = Field(default=2, ge=1, le=SEQ_MAX)
    """Number of rows of the segment embedding: 2 in BERT, which uses the second row for the second text of a pair, and
    1 in RoBERTa. hpctrain trains on single texts and uses only the first row."""
    norm_eps: float = Field(default=1e-12, gt=0)
    """Number added to the variance in LayerNorm."""

    later_fields = frozenset({"position_offset", "segments"})

    @model_validator(mode="after")
    def _check(self) -> EncoderSpec:
        if self.position_offset and self.position_offset - 1 != self.padding_id:
            raise ValueError(f"position_offset is {self.position_offset}; allowed: 0, or padding_id + 1 as in RoBERTa")
        return self

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters that one of `tp` devices holds of a stage outside its blocks: of the
        embeddings of tokens, positions and segments and their norm in the `first` stage, of the head in the `last`
        stage. Every device holds the whole d × d matrix of the head (d: `dim`)."""
        shards = self.head_shards(tp)
        front = (self.position_rows + self.segments + 2) * self.dim
        back = self.dim * self.dim + 3 * self.dim + self.vocabulary // shards
        return self.tables(first, last) * self.embedding_parameters() // shards + front * first + back * last

    def head_flops(self, tokens: int) -> float:
        return 2.0 * tokens * (self.vocabulary + self.dim) * self.dim


FamilySpec = DecoderSpec | Gpt2Spec | EncoderSpec | EncoderDecoderSpec
"""Dimensions of a model of any family; the key `family` says which, by default the decoder."""


def _t5(layers: int, dim: int, heads: int, head_dim: int, ffn_dim: int) -> EncoderDecoderSpec:
    """Return a T5 v1.0 (Raffel et al. 2020) with `layers` blocks in the encoder and as many in the decoder."""
    return EncoderDecoderSpec(layers=2 * layers, dim=dim, heads=heads, head_dim=head_dim, ffn_dim=ffn_dim)


def _t5_v1_1(layers: int, dim: int, heads: int, ffn_dim: int) -> EncoderDecoderSpec:
    """Return a T5 v1.1 (gated GELU, attention heads of width 64, an untied head) with `layers` blocks in the encoder
    and as many in the decoder."""
    return EncoderDecoderSpec(
        layers=2 * layers, dim=dim, heads=heads, head_dim=64, ffn_dim=ffn_dim, gated=True, tied=False
    )


PRESETS: dict[str, FamilySpec] = {
    "tiny-1m": DecoderSpec(layers=6, dim=128, heads=4),
    "mini-10m": DecoderSpec(layers=8, dim=320, heads=5),
    "small-125m": DecoderSpec(layers=12, dim=768, heads=12),
    "medium-350m": DecoderSpec(layers=24, dim=1024, heads=16),
    "large-1.3b": DecoderSpec(layers=24, dim=2048, heads=16),
    "xl-7b": DecoderSpec(layers=32, dim=4096, heads=32, ffn_dim=11008),
    "xxl-70b": DecoderSpec(layers=80, dim=8192, heads=64, kv_heads=8, ffn_dim=28672),
    "llama-1b": DecoderSpec(layers=16, dim=2048, heads=32, kv_heads=8, ffn_dim=8192, tied=True, rope_base=500_000),
    "llama-3b": DecoderSpec(layers=28, dim=3072, heads=24, kv_heads=8, ffn_dim=8192, tied=True, rope_base=500_000),
    "llama-8b": DecoderSpec(layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, rope_base=500_000),
    "llama-13b": DecoderSpec(layers=40, dim=5120, heads=40, ffn_dim=13824),
    "gpt2-30m": Gpt2Spec(layers=6, dim=384, heads=6),
    "gpt2-124m": Gpt2Spec(layers=12, dim=768, heads=12),
    "gpt2-355m": Gpt2Spec(layers=24, dim=1024, heads=16),
    "gpt2-774m": Gpt2Spec(layers=36, dim=1280, heads=20),
    "gpt2-1.5b": Gpt2Spec(layers=48, dim=1600, heads=25),
    "gpt3-6.7b": Gpt2Spec(layers=32, dim=4096, heads=32, positions=2048),
    "gpt3-13b": Gpt2Spec(layers=40, dim=5120, heads=40, positions=2048),
    "bert-4m": EncoderSpec(layers=2, dim=128, heads=2),
    "bert-11m": EncoderSpec(layers=4, dim=256, heads=4),
    "bert-41m": EncoderSpec(layers=8, dim=512, heads=8),
    "bert-110m": EncoderSpec(layers=12, dim=768, heads=12),
    "bert-340m": EncoderSpec(layers=24, dim=1024, heads=16),
    "paper-12x768": EncoderSpec(layers=12, dim=768, heads=12),
    "encoder-1.3b": EncoderSpec(layers=24, dim=2048, heads=16),
    "t5-16m": _t5(4, 256, 4, 64, 1024),
    "t5-60m": _t5(6, 512, 8, 64, 2048),
    "t5-220m": _t5(12, 768, 12, 64, 3072),
    "t5-770m": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16384),
    "t5-11b": _t5(24, 1024, 128, 128, 65536),
    "t5-v1.1-77m": _t5_v1_1(8, 512, 6, 1024),
    "t5-v1.1-250m": _t5_v1_1(12, 768, 12, 2048),
    "t5-v1.1-780m": _t5_v1_1(24, 1024, 16, 2816),
    "t5-v1.1-3b": _t5_v1_1(24, 2048, 32, 5120),
    "t5-v1.1-11b": _t5_v1_1(24, 4096, 64, 10240),
}
"""Models by name: like Llama (Touvron et al. 2023 and later releases), GPT-2 (Radford et al. 2019; the two largest have
the shapes of Brown et al. 2020), BERT (Devlin et al. 2019, Turc et al. 2019), T5 (Raffel et al. 2020). The number in a
name is the model's usual size in parameters; the exact count depends on the vocabulary.

`paper-12x768` and `encoder-1.3b` both stand for the model of the paper (Sun 2026). Its section 4.1 states 12 layers of
width 768, which with a vocabulary of 32,000 are 0.11 billion parameters, but calls them 1.3 billion. `paper-12x768` has
the stated shape, `encoder-1.3b` has the stated size and a common shape. The paper does not say which model was trained.
"""
