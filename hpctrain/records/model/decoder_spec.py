"""The decoder-only Transformer like Llama, and the settings by which later models differ from it (Qwen, Mistral, Gemma,
Phi, OLMo). The defaults are Llama 2's.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.records.format.document import HEADS_MAX, LAYERS_MAX, SEQ_MAX, WIDTH_MAX
from hpctrain.records.model.block_stack import EqualBlocks
from hpctrain.records.model.rope_scaling import LongRope, RopeScaling


class DecoderSpec(EqualBlocks):
    """A decoder-only Transformer like Llama (Touvron et al. 2023): RMSNorm, rotary positions, gated feed-forward layer,
    grouped-query attention."""

    family: Literal["decoder"] = "decoder"
    """The kind of Transformer."""
    kv_heads: int | None = Field(default=None, ge=1, le=HEADS_MAX)
    """Number of key and value heads (grouped-query attention), a divisor of `heads`. Default: `heads`."""
    head_dim: int | None = Field(default=None, ge=1, le=WIDTH_MAX)
    """Width of an attention head. Default: `dim / heads`."""
    ffn_dim: int | None = Field(default=None, ge=1, le=WIDTH_MAX)
    """Width inside the gated feed-forward layer. Default: 8/3 of `dim`, rounded up to a multiple of 32."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """Activation in the gated feed-forward layer: SiLU makes it a SwiGLU, GELU (exact, or in its tanh form) a GeGLU."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Matrices of the attention that have a bias: none, those of queries, keys and values, or the output's too."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of queries and keys before the rotary positions: none, over each head, or over all heads together."""
    norms: Literal["before", "after", "both"] = "before"
    """Place of the RMSNorms of a block: on the input of attention and feed-forward layer, on their output before it is
    added to the residual stream, or on both."""
    norm_offset: bool = False
    """Whether RMSNorm multiplies by 1 + weight (Gemma) in place of weight."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Number added under the root in RMSNorm."""
    embedding_scaled: bool = False
    """Whether embeddings are multiplied by the root of `dim` (Gemma)."""
    score_width: int | None = Field(default=None, ge=1, le=WIDTH_MAX)
    """Number by whose root attention scores are divided. Default: the width of a head."""
    score_cap: float | None = Field(default=None, gt=0)
    """Soft cap c of attention scores, which become c·tanh(score/c). All scores are then held in memory. Default:
    none."""
    logit_cap: float | None = Field(default=None, gt=0)
    """Soft cap c of logits, which become c·tanh(logit/c). Default: none."""
    window: int | None = Field(default=None, ge=1, le=SEQ_MAX)
    """Sliding window: number of tokens, its own included, that a token attends to. Default: no window; a token attends
    to itself and all earlier ones."""
    full_blocks: tuple[int, ...] = Field(default=(), max_length=LAYERS_MAX)
    """Numbers of the blocks in which attention has no window, from 0, in ascending order. Default: none of them."""
    rope_base: float = Field(default=10_000.0, gt=1)
    """Base of the rotary position angles (Su et al. 2021)."""
    window_rope_base: float | None = Field(default=None, gt=1)
    """Base of the rotary position angles in blocks with a window; their angles are not scaled. Default: angles as in
    all other blocks."""
    rotary_dim: int | None = Field(default=None, ge=2, le=WIDTH_MAX)
    """Numbers of each head that are rotated by position, from the first on. Default: all of a head."""
    rope_scaling: RopeScaling | None = None
    """How the rotary position angles are scaled for long sequences. Default: not at all."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    later_fields = frozenset({
        "head_dim", "activation", "attention_bias", "qk_norm", "norms", "norm_offset", "embedding_scaled",
        "score_width", "score_cap", "logit_cap", "window", "full_blocks", "window_rope_base", "rotary_dim",
        "rope_scaling",
    })  # fmt: skip

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> DecoderSpec:
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}; give head_dim")
        return self

    @model_validator(mode="after")
    def _check(self) -> DecoderSpec:
        name = "rotary_dim" if self.rotary_dim is not None else "dim / heads" if self.head_dim is None else "head_dim"
        if self.rotary_width % 2:
            raise ValueError(f"{name} is {self.rotary_width}; rotary positions need an even number")
        if self.rotary_width > self.head_width:
            raise ValueError(f"rotary_dim {self.rotary_dim} is more than the width of a head, {self.head_width}")
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.key_value_heads}")
        if self.window is None and (self.full_blocks or self.window_rope_base is not None):
            raise ValueError("full_blocks and window_rope_base need a window")
        if list(self.full_blocks) != sorted(set(self.full_blocks) & set(range(self.layers))):
            raise ValueError(f"full_blocks: allowed: numbers from 0 to {self.layers - 1}, in ascending order")
        if isinstance(self.rope_scaling, LongRope):
            for field in ("short_factor", "long_factor"):
                count = len(getattr(self.rope_scaling, field))
                if count != self.rotary_width // 2:
                    raise ValueError(
                        f"rope_scaling.{field} has {count} numbers, a head {self.rotary_width // 2} angles"
                    )
        return self

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def query_width(self) -> int:
        """Return the width of all query heads together."""
        return self.heads * self.head_width

    @property
    def key_value_width(self) -> int:
        """Return the width of all key heads together, which is that of all value heads together."""
        return self.key_value_heads * self.head_width

    @property
    def rotary_width(self) -> int:
        """Return how many numbers of each head are rotated by position."""
        return self.rotary_dim or self.head_width

    @property
    def hidden(self) -> int:
        """Return the width inside the gated feed-forward layer."""
        return self.ffn_dim or -(-self.dim * 8 // 3 // 32) * 32

    @property
    def score_divisor(self) -> int:
        """Return the number by whose root attention scores are divided."""
        return self.score_width or self.head_width

    @property
    def block_weights(self) -> int:
        return self._attention_weights + 3 * self.dim * self.hidden

    @property
    def attention_share(self) -> float:
        return self._attention_weights / self.block_weights

    @property
    def _attention_weights(self) -> int:
        return 2 * self.dim * (self.query_width + self.key_value_width)

    @property
    def block_norms(self) -> int:
        """Return the number of norms of a block whose input is the residual stream, or a result that the block adds to
        it."""
        return 4 if self.norms == "both" else 2

    def block_window(self, block: int) -> int | None:
        """Return the sliding window of block number `block` in tokens; None: the block has none."""
        return None if block in self.full_blocks else self.window

    def block_rope(self, block: int) -> tuple[float, RopeScaling | None]:
        """Return base and scaling of the rotary position angles of block number `block`."""
        if self.window_rope_base is None or self.block_window(block) is None:
            return self.rope_base, self.rope_scaling
        return self.window_rope_base, None

    def block_parameters(self, tp: int = 1) -> int:
        split, whole = self.block_weights, self.block_norms * self.dim
        if self.attention_bias != "none":
            split += self.query_width + 2 * self.key_value_width
        if self.attention_bias == "all":
            whole += self.dim
        if self.qk_norm == "width":
            split += self.query_width + self.key_value_width
        if self.qk_norm == "head":
            whole += 2 * self.head_width
        return split // tp + whole

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters that one of `tp` devices holds of a stage outside its blocks: of the
        embedding in the `first` stage, of the final norm and the head in the `last` stage."""
        tables = self.tables(first, last) * self.embedding_parameters() // self.head_shards(tp)
        return tables + (self.dim if last else 0)

    def tensor_parallel_error(self, tp: int) -> str | None:
        for name, size in (("heads", self.heads), ("kv_heads", self.key_value_heads), ("SwiGLU width", self.hidden)):
            if size % tp:
                return f"{name} {size} is not a multiple of tp {tp}"
        return None

    def forward_flops(self, sequences: int, seq_len: int, start: int = 0) -> float:
        """Return the FLOPs of a forward pass of `sequences` sequences through the blocks from number `start` on, and
        through the head. The attention of a block takes 4·d FLOPs for each pair of a token and a token that it sees (d:
        width of all query heads together). A token sees half of the sequence on average, or with a window of w tokens
        w·(1 - w/(2·s)) tokens (s: `seq_len`)."""
        tokens, blocks = sequences * seq_len, self.layers - start
        scores = 4.0 * self.query_width * self._visible(seq_len, start)
        return tokens * (2.0 * self.block_weights * blocks + scores) + self.head_flops(tokens)

    def attention_products(self, sequences: int, seq_len: int) -> float:
        return sequences * seq_len * self.query_width * self._visible(seq_len) / self.layers

    def _visible(self, seq_len: int, start: int = 0) -> float:
        """Return how many tokens a token sees on average, summed over the blocks from number `start` on."""
        blocks = self.layers - start
        visible = 0.5 * seq_len * blocks
        if self.window is not None and self.window < seq_len:
            windowed = blocks - sum(block >= start for block in self.full_blocks)
            visible += windowed * (self.window * (1 - self.window / (2 * seq_len)) - 0.5 * seq_len)
        return visible

    @property
    def norm_values(self) -> int:
        return 2 * self.block_norms * self.dim

    def split_values(self, seq_len: int) -> tuple[int, int]:
        """Return two counts of numbers per token in those tensors of a block that tensor parallelism splits, over all
        devices together: (all numbers that the backward pass needs; those of them that are results of matrix products
        or attention).

        Widths are q (all query heads), kv (all key heads) and f (`hidden`). The backward pass needs queries, keys and
        values, which count twice, before and after the rotation by position (2·(q + 2·kv)), and the attention output
        (q). In the gated feed-forward layer it needs two matrix products, the activation of the first one, and the
        activation times the second one (4·f). A norm of queries and keys adds its inputs and outputs (2·(q +
        kv)). With a window or a soft cap, keys and values are repeated for each query head (2·(q - kv)). Results of
        matrix products and attention are queries, keys, values, attention output and the feed-forward layer's two
        products. With a soft cap, two numbers for each attention score are added, of which one is a result.
        """
        query, key_value = self.query_width, self.key_value_width
        backward = 2 * (query + 2 * key_value) + query + 4 * self.hidden
        if self.qk_norm != "none":
            backward += 2 * (query + key_value)
        if self.window is not None or self.score_cap is not None:
            backward += 2 * (query - key_value)
        scores = self.heads * seq_len if self.score_cap is not None else 0
        return backward + 2 * scores, 2 * query + 2 * key_value + 2 * self.hidden + scores
