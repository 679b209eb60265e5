"""Base class of GPT-2 and BERT: learned positions, LayerNorm, GELU, and a bias at every matrix."""

from __future__ import annotations

from pydantic import Field, model_validator

from hpctrain.records.format.bounds import SEQ_MAX, WIDTH_MAX
from hpctrain.records.model.transformer_spec import TransformerSpec


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
