"""A decoder like Llama: its dimensions, and counts of parameters, FLOPs and activations that need no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.records.format.bounds import HEADS_MAX, WIDTH_MAX
from hpctrain.records.model.transformer_spec import TransformerSpec


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
