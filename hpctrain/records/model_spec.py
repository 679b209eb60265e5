"""The shape of a model, its presets, and counts that need no torch: parameters, FLOPs, activation sizes.

A model is `layers` equal blocks between an embedding and a head. A stage holds blocks [from, to); the first stage also
holds the embedding, the last one the final norm and the head.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.records.document import Part, content_sha256


class ModelSpec(Part):
    """A decoder-only Transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

    family: Literal["decoder"] = "decoder"
    """The kind of Transformer."""
    layers: int = Field(ge=1)
    """Number of blocks."""
    dim: int = Field(ge=2)
    """Width of the residual stream."""
    heads: int = Field(ge=1)
    """Attention heads; `dim` is a multiple of it."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads (grouped-query attention); `heads` is a multiple of it. Default: `heads`."""
    ffn_dim: int | None = Field(default=None, ge=1)
    """Width inside the SwiGLU. Default: 8/3 of `dim`, rounded up to a multiple of 32."""
    vocab: int | None = Field(default=None, ge=2)
    """Size of the vocabulary. Default: that of the tokenizer of the data."""
    tied: bool = False
    """The head uses the embedding's matrix."""
    rope_base: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position angles."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added under the root in RMSNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if (self.dim // self.heads) % 2:
            raise ValueError(f"dim / heads is {self.dim // self.heads}; rotary positions need an even number")
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.key_value_heads}")
        return self

    def sha256(self) -> str:
        """Hash of the dimensions: weights fit models with the same hash only."""
        return content_sha256(self)

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

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary; ask only after the data has settled it."""
        assert self.vocab is not None, "the vocabulary is settled when a run file meets its data"
        return self.vocab

    def block_parameters(self, tp: int = 1) -> int:
        """Parameters of one block on one of `tp` devices: matrices are split, norms are whole on each."""
        key_value = self.key_value_heads * self.head_dim
        attention = 2 * self.dim * self.dim + 2 * self.dim * key_value
        return (attention + 3 * self.dim * self.hidden) // tp + 2 * self.dim

    def head_shards(self, tp: int) -> int:
        """Parts that embedding and head are cut into: by vocabulary where that divides, else they are whole."""
        return tp if self.vocabulary % tp == 0 else 1

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Parameters of embedding (first), final norm and head (last) of a stage, on one of `tp` devices.

        A tied matrix counts once in a stage with both ends; where the model is cut, each end holds a copy of it.
        """
        tables = int(first or last) if self.tied else int(first) + int(last)
        return tables * self.embedding_parameters() // self.head_shards(tp) + (self.dim if last else 0)

    def why_no_tensor_parallel(self, tp: int) -> str | None:
        """None when the blocks can be cut into `tp` parts, else the reason."""
        for name, size in (("heads", self.heads), ("kv_heads", self.key_value_heads), ("SwiGLU width", self.hidden)):
            if size % tp:
                return f"{name} {size} is not a multiple of tp {tp}"
        return None

    def why_no_pipeline(self, stages: int) -> str | None:
        """None when the model can be cut into that many stages, else the reason."""
        return None

    @property
    def gathers_cast(self) -> bool:
        """Whether sharded weights are cast to the precision of matrix products before they are gathered."""
        return True

    def embedding_parameters(self) -> int:
        return self.vocabulary * self.dim

    def parameters(self, start: int = 0, stop: int | None = None, tp: int = 1) -> int:
        """Parameters of the blocks [start, stop), with embedding and head where they belong, on one of `tp` devices."""
        stop = self.layers if stop is None else stop
        ends = self.end_parameters(tp, first=start == 0, last=stop == self.layers)
        return (stop - start) * self.block_parameters(tp) + ends

    def forward_flops(self, rows: int, seq_len: int, start: int = 0, stop: int | None = None) -> float:
        """FLOPs of a forward pass over `rows` sequences through blocks [start, stop); backward costs twice that.

        Matrix products 2 FLOPs per parameter and token; attention 4·s·d per token and block, halved by the causal
        mask (Korthikanti et al. 2022, appendix A, without the recompute term).
        """
        stop = self.layers if stop is None else stop
        tokens = rows * seq_len
        flops = (stop - start) * tokens * (2.0 * (self.block_parameters() - 2 * self.dim) + 2.0 * seq_len * self.dim)
        if stop == self.layers:
            flops += 2.0 * tokens * self.vocabulary * self.dim
        return flops

    def boundary_bytes(self, rows: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """Size of the activation [rows, seq, dim] that travels between two stages."""
        return rows * seq_len * self.dim * bytes_per_value

    def activation_bytes(self, rows: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """What one block keeps for its backward pass, for one micro-batch of `rows` sequences.

        Counted from the block as written: inputs of both norms and their normalised outputs (4 d), queries, keys and
        values with their rotated copies (2·(d + 2·kv)), attention output (d), SwiGLU's two products, the activation and
        their product (4·f); split over `tp` where the matrices are.
        """
        key_value = self.key_value_heads * self.head_dim
        split = 2 * (self.dim + 2 * key_value) + self.dim + 4 * self.hidden
        return int(rows * seq_len * bytes_per_value * (4 * self.dim + split / tp))

    def stream_bytes(self, rows: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """The part of `activation_bytes` that tensor parallelism leaves whole: inputs and outputs of both norms."""
        return rows * seq_len * bytes_per_value * 4 * self.dim

    def product_bytes(self, rows: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Results of a block's matrix products and attention, which selective recomputation keeps.

        Queries, keys, values, attention output and both SwiGLU products are split over `tp`; what the two projections
        write to the stream is whole on each device.
        """
        key_value = self.key_value_heads * self.head_dim
        split = 2 * self.dim + 2 * key_value + 2 * self.hidden
        return int(rows * seq_len * bytes_per_value * (2 * self.dim + split / tp))

    def selective_flops(self, rows: int, seq_len: int) -> float:
        """Matrix products of a block that selective recomputation repeats: none, their results are kept."""
        return 0.0

    def selective_bytes(self, rows: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """What the operations that selective recomputation repeats go through: all of a block's activations."""
        return self.activation_bytes(rows, seq_len, tp, bytes_per_value)

    def logits_bytes(self, rows: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """What the head and the loss keep: logits, their log-softmax and the gradient of one of them."""
        return int(3 * rows * seq_len * self.vocabulary * bytes_per_value / tp)


PRESETS: dict[str, ModelSpec] = {
    "tiny-1m": ModelSpec(layers=6, dim=128, heads=4),
    "mini-10m": ModelSpec(layers=8, dim=320, heads=5),
    "small-125m": ModelSpec(layers=12, dim=768, heads=12),
    "medium-350m": ModelSpec(layers=24, dim=1024, heads=16),
    "large-1.3b": ModelSpec(layers=24, dim=2048, heads=16),
    "xl-7b": ModelSpec(layers=32, dim=4096, heads=32, ffn_dim=11008),
    "xxl-70b": ModelSpec(layers=80, dim=8192, heads=64, kv_heads=8, ffn_dim=28672),
}
"""Named models; the name says the size that the field calls it by, the data's vocabulary decides the exact count."""
