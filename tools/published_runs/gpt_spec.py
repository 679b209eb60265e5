"""The model of the published runs: GPT-2's block as Megatron-LM computes it, which keeps the attention scores in
memory, or with fused attention, which does not."""

from __future__ import annotations

from hpctrain.records.model.decoder_spec import DecoderSpec

KERNEL_PASSES = (4.0, 7.0)
"""Reads and writes of the scores in the forward and in the backward pass with Megatron's softmax kernel. Forward: the
product of queries and keys writes them, the kernel reads and writes them, the product with the values reads them.
Backward: four products read or write them, the kernel reads two tensors of them and writes one."""
PLAIN_PASSES = (6.0, 20.0)
"""The same where mask and softmax are operations of their own, counted in a trace of torch 2.13. The forward pass masks
a view of the scores in place, so the backward pass of the mask copies their gradient six times."""
DROPOUT_PASSES = (2.5, 2.5)
"""What dropout adds: a read, a write, and the write or read of a mask of half as many bytes."""

WITHOUT_TENSOR_CORES = 16.0
"""FLOP/s of an A100 with tensor cores, divided by those without: 312 / 19.5 TFLOP/s (data sheet)."""


class GptSpec(DecoderSpec):
    """GPT-2 with LayerNorm, learned positions, GELU and biases.

    Activation bytes follow Korthikanti et al. 2022, section 4: a block keeps s·b·h·(10 + 24/t + 5·a·s/(h·t)) bytes
    in fp16, with sequence s, micro-batch b, width h, a heads and tensor parallelism t. Of these, 2 in the 10, and 1
    of the 5 for each score, are dropout masks of one byte. Without dropout there are no masks and no second copy of
    the scores. Fused attention keeps no scores, and does not compute those that the causal mask hides.
    """

    tied: bool = True
    positions: int
    """Rows of the table of learned positions."""
    dropout: bool = True
    """Whether the run used dropout."""
    fused: bool = False
    """Whether one kernel computes attention, as FlashAttention (Dao et al. 2022)."""
    plain: bool = False
    """Whether scale, mask and softmax are operations of their own; else one kernel computes them, as Megatron's for
    half precision."""
    gated: bool = False
    """Whether the feed-forward layer is gated, with three matrices in place of two."""
    head: bool = True
    """Whether the model ends with a head over the vocabulary; a model for classification does not."""

    @property
    def hidden(self) -> int:
        return self.ffn_dim or 4 * self.dim

    @property
    def block_weights(self) -> int:
        attention = 2 * self.dim * (self.query_width + self.key_value_width)
        return attention + (3 if self.gated else 2) * self.dim * self.hidden

    def block_parameters(self, tp: int = 1) -> int:
        biases = self.query_width + 2 * self.key_value_width + (2 if self.gated else 1) * self.hidden
        return (self.block_weights + biases) // tp + 6 * self.dim

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        positions = self.positions * self.dim if first else 0
        return super().end_parameters(tp, first=first, last=last and self.head) + positions

    def forward_flops(self, rows: int, seq_len: int, start: int = 0, stop: int | None = None) -> float:
        """Return the FLOPs of the forward pass of the blocks [start, stop) and, with the last block, the head, for
        `rows` sequences. Without fused attention, all attention scores count, including masked ones, as in Korthikanti
        et al. 2022, appendix A.

        Args:
            stop: end of the blocks; None: all from `start` on.
        """
        stop = self.layers if stop is None else stop
        scores = self.selective_flops(rows, seq_len) / (2 if self.fused else 1)
        flops = (stop - start) * (rows * seq_len * 2.0 * self.block_weights + scores)
        return flops + self.head_flops(rows * seq_len) if stop == self.layers else flops

    def head_flops(self, tokens: int) -> float:
        return super().head_flops(tokens) if self.head else 0.0

    def logits_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        return super().logits_bytes(sequences, seq_len, tp, bytes_per_value) if self.head else 0

    def activation_bytes(self, rows: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        whole = 4 * bytes_per_value + 2 * self.dropout
        attention = (2 * self.query_width + 2 * self.key_value_width) / self.dim
        split = (attention + (3 if self.gated else 2) * self.hidden / self.dim) * bytes_per_value
        kept = rows * seq_len * self.dim * (whole + split / tp)
        return int(kept) + self.selective_bytes(rows, seq_len, tp, bytes_per_value)

    def residual_stream_bytes(self, rows: int, seq_len: int, bytes_per_value: int = 4) -> int:
        return int(rows * seq_len * self.dim * (4 * bytes_per_value + 2 * self.dropout))

    def matmul_output_bytes(self, rows: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the activation bytes that a block keeps with selective recomputation, which computes the attention
        scores again."""
        kept = self.activation_bytes(rows, seq_len, tp, bytes_per_value)
        return kept - self.selective_bytes(rows, seq_len, tp, bytes_per_value)

    def attention_products(self, rows: int, seq_len: int) -> float:
        return rows * seq_len * seq_len * self.query_width / (2 if self.fused else 1)

    def touched_score_bytes(
        self, rows: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4
    ) -> tuple[float, float] | None:
        if self.fused:
            return None
        passes = PLAIN_PASSES if self.plain else KERNEL_PASSES
        once = rows * seq_len * seq_len * self.heads * bytes_per_value / tp
        forward, backward = (
            (count + more * self.dropout) * once for count, more in zip(passes, DROPOUT_PASSES, strict=True)
        )
        return forward, backward

    def kept_score_bytes(self, rows: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        return self.selective_bytes(rows, seq_len, tp, bytes_per_value)

    def selective_flops(self, rows: int, seq_len: int) -> float:
        """Return the FLOPs of a block that Megatron's selective recomputation repeats: the attention scores and
        their product with the values. Half-precision products with heads whose width is no multiple of 8 do not use
        tensor cores, so each of their FLOPs counts `WITHOUT_TENSOR_CORES` times."""
        slow = not self.fused and not self.plain and self.head_width % 8 != 0
        return 4.0 * rows * seq_len * seq_len * self.query_width * (WITHOUT_TENSOR_CORES if slow else 1)

    def selective_bytes(self, rows: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes that a block keeps of its attention scores: the softmax output and, with dropout, the
        mask and the result after it; 0 with fused attention. Selective recomputation does not keep them."""
        if self.fused:
            return 0
        each = 2 * bytes_per_value + 1 if self.dropout else bytes_per_value
        return self.heads * seq_len * seq_len * rows * each // tp
