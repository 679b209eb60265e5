"""The model families that hpctrain builds, as `model.dims` of a run file names them: a decoder like Llama, GPT-2 and
BERT. The encoder-decoder has a file of its own, because its counts depend on the cut.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from hpctrain.records.format.bounds import HEADS_MAX, SEQ_MAX, WIDTH_MAX
from hpctrain.records.format.document import Part
from hpctrain.records.model.block_stack import TransformerSpec, require_family
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec


class DecoderSpec(TransformerSpec):
    """A decoder-only Transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

    family: Literal["decoder"] = "decoder"
    """The kind of Transformer."""
    kv_heads: int | None = Field(default=None, ge=1, le=HEADS_MAX)
    """Key and value heads (grouped-query attention); `heads` is a multiple of it. Default: `heads`."""
    ffn_dim: int | None = Field(default=None, ge=1, le=WIDTH_MAX)
    """Width inside the SwiGLU. Default: 8/3 of `dim`, rounded up to a multiple of 32."""
    rope_base: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position angles."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added under the root in RMSNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _check(self) -> DecoderSpec:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if (self.dim // self.heads) % 2:
            raise ValueError(f"dim / heads is {self.dim // self.heads}; rotary positions need an even number")
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.key_value_heads}")
        return self

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """Width inside the SwiGLU."""
        return self.ffn_dim or -(-self.dim * 8 // 3 // 32) * 32

    def block_parameters(self, tp: int = 1) -> int:
        key_value = self.key_value_heads * self.head_dim
        attention = 2 * self.dim * self.dim + 2 * self.dim * key_value
        return (attention + 3 * self.dim * self.hidden) // tp + 2 * self.dim

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters of embedding (first), final norm and head (last) of a stage, on one of `tp`
        devices."""
        tables = int(first or last) if self.tied else int(first) + int(last)
        return tables * self.embedding_parameters() // self.head_shards(tp) + (self.dim if last else 0)

    def tensor_parallel_error(self, tp: int) -> str | None:
        for name, size in (("heads", self.heads), ("kv_heads", self.key_value_heads), ("SwiGLU width", self.hidden)):
            if size % tp:
                return f"{name} {size} is not a multiple of tp {tp}"
        return None

    def forward_flops(self, sequences: int, seq_len: int, start: int = 0, stop: int | None = None) -> float:
        """Return the FLOPs of a forward pass through blocks [start, stop), and through the head where the last block is
        among them. Attention takes 4·s·d FLOPs per token and block, halved by the causal mask (s: `seq_len`, d:
        `dim`)."""
        stop = self.layers if stop is None else stop
        tokens = sequences * seq_len
        flops = (stop - start) * tokens * (2.0 * (self.block_parameters() - 2 * self.dim) + 2.0 * seq_len * self.dim)
        if stop == self.layers:
            flops += 2.0 * tokens * self.vocabulary * self.dim
        return flops

    def activation_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of activations that one block keeps for its backward pass, for one micro-batch of
        `sequences`.

        Counted from the code of the block: inputs of both norms and their normalised outputs (4 d), queries, keys and
        values with their rotated copies (2·(d + 2·kv)), attention output (d), SwiGLU's two products, the activation and
        their product (4·f); split over `tp` where the matrices are.
        """
        key_value = self.key_value_heads * self.head_dim
        split = 2 * (self.dim + 2 * key_value) + self.dim + 4 * self.hidden
        return int(sequences * seq_len * bytes_per_value * (4 * self.dim + split / tp))

    def residual_stream_bytes(self, sequences: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """Return the part of `activation_bytes` that tensor parallelism leaves whole: inputs and outputs of both
        norms."""
        return sequences * seq_len * bytes_per_value * 4 * self.dim

    def matmul_output_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of the results of a block's matrix products and attention, which selective recomputation
        keeps.

        Queries, keys, values, attention output and both SwiGLU products are split over `tp`; the outputs of the two
        projections into the residual stream are whole on each device.
        """
        key_value = self.key_value_heads * self.head_dim
        split = 2 * self.dim + 2 * key_value + 2 * self.hidden
        return int(sequences * seq_len * bytes_per_value * (2 * self.dim + split / tp))


class BiasedSpec(TransformerSpec):
    """A Transformer with biases and learned positions: each block has 4 d² + 2 d·f weights (d: `dim`, f: `ffn_dim`)."""

    ffn_dim: int | None = Field(default=None, ge=1, le=WIDTH_MAX)
    """Width inside the feed-forward layer. Default: 4 times `dim`."""
    tied: bool = True
    """The head uses the embedding's matrix."""
    positions: int = Field(ge=1, le=SEQ_MAX)
    """Learned positions: the longest sequence."""
    norm_eps: float = Field(gt=0)
    """Added to the variance in LayerNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _check(self) -> BiasedSpec:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        return self

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        return self.ffn_dim or 4 * self.dim

    @property
    def hidden_by_mask(self) -> float:
        """Return the share of the attention scores that a mask hides and that are therefore not computed."""
        return 0.0

    def sequence_length_error(self, seq_len: int) -> str | None:
        if seq_len <= self.positions:
            return None
        return f"the model has {self.positions} positions (model.dims.positions)"

    def block_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters of one block on one of `tp` devices; norms and biases of the residual stream
        are not split."""
        split = 4 * self.dim * self.dim + 2 * self.dim * self.hidden + 3 * self.dim + self.hidden
        return split // tp + 6 * self.dim

    def forward_flops(self, sequences: int, seq_len: int, start: int = 0, stop: int | None = None) -> float:
        """Return the FLOPs of a forward pass through blocks [start, stop), and through the head where the last block is
        among them. Attention takes 4·s·d FLOPs per token and block, less the scores that a mask hides (s: `seq_len`, d:
        `dim`)."""
        stop = self.layers if stop is None else stop
        matrices = 4 * self.dim * self.dim + 2 * self.dim * self.hidden
        scores = 4.0 * seq_len * self.dim * (1 - self.hidden_by_mask)
        flops = (stop - start) * sequences * seq_len * (2.0 * matrices + scores)
        return flops + (self.head_flops(sequences * seq_len) if stop == self.layers else 0.0)

    def head_flops(self, tokens: int) -> float:
        """Return the FLOPs of the matrix products after the last block."""
        return 2.0 * tokens * self.vocabulary * self.dim

    def activation_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of activations that one block keeps for its backward pass, for one micro-batch of
        `sequences`.

        Counted from the code of the block: inputs and outputs of both norms (4 d); queries, keys, values and attention
        output (4 d), input and output of the GELU (2 f), split over `tp`.
        """
        split = 4 * self.dim + 2 * self.hidden
        return int(sequences * seq_len * bytes_per_value * (4 * self.dim + split / tp))

    def residual_stream_bytes(self, sequences: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """Return the part of `activation_bytes` that tensor parallelism leaves whole: inputs and outputs of both
        norms."""
        return sequences * seq_len * bytes_per_value * 4 * self.dim

    def matmul_output_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of the results of a block's matrix products and attention, which selective recomputation
        keeps. The outputs of the two projections into the residual stream are whole on each device; the rest is split
        over `tp`."""
        split = 4 * self.dim + self.hidden
        return int(sequences * seq_len * bytes_per_value * (2 * self.dim + split / tp))

    def tables(self, first: bool, last: bool) -> int:
        """Return how many embedding and head matrices a stage holds that is the first or the last one of the model."""
        return int(first or last) if self.tied else int(first) + int(last)


class Gpt2Spec(BiasedSpec):
    """A decoder-only Transformer after Radford et al. 2019: LayerNorm before each layer, GELU in its tanh form."""

    model_config = ConfigDict(json_schema_extra=require_family)

    family: Literal["gpt2"] = "gpt2"
    """The kind of Transformer."""
    positions: int = Field(default=1024, ge=1, le=SEQ_MAX)
    """Learned positions: the longest sequence."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance in LayerNorm."""

    @property
    def hidden_by_mask(self) -> float:
        """Return the share of the attention scores that is not computed: one half, the scores of later tokens."""
        return 0.5

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters of embedding and positions (first), last norm and head (last), on one of `tp`
        devices."""
        tables = self.tables(first, last) * self.embedding_parameters() // self.head_shards(tp)
        return tables + self.positions * self.dim * first + 2 * self.dim * last


SEGMENTS = 2
"""Rows of BERT's segment embedding; a text without pairs of sentences uses only the first."""


class EncoderSpec(BiasedSpec):
    """An encoder-only Transformer after Devlin et al. 2019: LayerNorm after each layer, GELU, and a head with a matrix,
    GELU and norm before the output embedding."""

    model_config = ConfigDict(json_schema_extra=require_family)

    family: Literal["encoder"] = "encoder"
    """The kind of Transformer."""
    positions: int = Field(default=512, ge=1, le=SEQ_MAX)
    """Learned positions: the longest sequence."""
    norm_eps: float = Field(default=1e-12, gt=0)
    """Added to the variance in LayerNorm."""

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters of embedding, positions, segments and their norm (first), and of the head
        (last), on one of `tp` devices; the matrix in the head is whole on each."""
        shards = self.head_shards(tp)
        front = (self.positions + SEGMENTS + 2) * self.dim
        back = self.dim * self.dim + 3 * self.dim + self.vocabulary // shards
        return self.tables(first, last) * self.embedding_parameters() // shards + front * first + back * last

    def head_flops(self, tokens: int) -> float:
        return 2.0 * tokens * (self.vocabulary + self.dim) * self.dim


FamilySpec = DecoderSpec | Gpt2Spec | EncoderSpec | EncoderDecoderSpec
"""Dimensions of one family; `family` says which, by default the decoder."""


class HfModel(Part):
    """A folder's config.json, the model's dimensions, and a hash of its weights."""

    config: dict[str, Any]
    """The folder's config.json, unchanged; an export is based on it."""
    dims: Annotated[FamilySpec, Field(discriminator="family")]
    """The model's dimensions as read from config.json."""
    weights_sha256: str
    """Hash of names, types, shapes and first bytes of all tensors: the run starts only from these weights."""
