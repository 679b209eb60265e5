"""Base class of the specifications of models with measured sizes, whose modules are not hpctrain's."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from hpctrain.records.format.document import SEQ_MAX, VOCAB_MAX, Part
from hpctrain.records.model.block_stack import BlockStack


class PartSizes(Part):
    """Measured parameters, FLOPs and activation bytes of a part of a model: of its front, a block or its back."""

    parameters: int = Field(ge=0)
    """Number of parameters in the part's weights."""
    flops: int = Field(ge=0)
    """FLOPs of a forward pass over one sequence."""
    activation_bytes: int = Field(ge=0)
    """Bytes of activations that the part keeps for the backward pass of one sequence, in fp32."""


class MeasuredStack(BlockStack):
    """A model with measured sizes. The model consists of front modules, equal blocks and back modules."""

    seq_len: int = Field(ge=1, le=SEQ_MAX)
    """Tokens in a sequence when the sizes were measured."""
    vocab: int = Field(ge=2, le=VOCAB_MAX)
    """Width of the logits."""
    front_sizes: PartSizes
    """Sizes of the front modules together."""
    block_sizes: PartSizes
    """Sizes of one block."""
    back_sizes: PartSizes
    """Sizes of the back modules together, without a weight that is counted with the front modules."""
    weights_sha256: str
    """SHA-256 of the names and shapes of all weights."""

    def sha256(self) -> str:
        """Return the SHA-256 of the names and shapes of all weights; weights fit only models with the same hash."""
        return self.weights_sha256

    @property
    def vocabulary(self) -> int:
        return self.vocab

    def block_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters that one of `tp` devices holds of one block; they are not split."""
        return self.block_sizes.parameters

    def embedding_parameters(self) -> int:
        """Return the number of parameters of front or back modules, whichever have more: it is unknown which module is
        the embedding."""
        return max(self.front_sizes.parameters, self.back_sizes.parameters)

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters that each of `tp` devices holds of a stage outside its blocks: of the front
        modules in the `first` stage, of the back modules in the `last` stage. They are not split."""
        return (self.front_sizes.parameters if first else 0) + (self.back_sizes.parameters if last else 0)

    def forward_flops(self, sequences: int, seq_len: int, start: int = 0) -> float:
        """Return the FLOPs of a forward pass of `sequences` sequences through the blocks from number `start` on, and
        through the back modules. With `start` 0, the front modules count, too."""
        flops = (self.layers - start) * self.block_sizes.flops + self.back_sizes.flops
        if start == 0:
            flops += self.front_sizes.flops
        return self._sequences(sequences, seq_len) * flops

    def shared_weights(self, cuts: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
        """Return name of a weight -> numbers of the stages that hold a copy, for each weight that several stages hold.
        The result is empty, because a model of this class with a tied weight runs as one stage.

        Args:
            cuts: the blocks [from, to) of each stage, in order.
        """
        return {}

    def activation_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of activations that one block keeps for its backward pass, on one of `tp` devices (they are
        not split), for a micro-batch of `sequences` sequences and numbers of `bytes_per_value` bytes."""
        saved = self.block_sizes.activation_bytes
        return int(self._sequences(sequences, seq_len) * saved * bytes_per_value / 4)

    def residual_stream_bytes(self, sequences: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """Return the bytes of a block's activations that tensor parallelism does not split: all of them."""
        return self.activation_bytes(sequences, seq_len, 1, bytes_per_value)

    def matmul_output_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of a block that selective recomputation keeps: those of all activations, because the results
        of matrix products were not measured separately."""
        return self.activation_bytes(sequences, seq_len, tp, bytes_per_value)

    def logits_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes that the loss and the back modules (`back`, after the blocks) take for a micro-batch: three
        tensors of the size of the logits (the logits, their log-softmax, and a gradient), and the measured activations
        of the back modules."""
        back_bytes = self._sequences(sequences, seq_len) * self.back_sizes.activation_bytes * bytes_per_value / 4
        return int(3 * sequences * seq_len * self.vocab * bytes_per_value + back_bytes)

    def head_shards(self, tp: int) -> int:
        """Return 1, because tensor parallelism does not split front and back modules."""
        return 1

    @property
    def supports_sequence_parallel(self) -> bool:
        """Return False, because it is unknown which modules are norms."""
        return False

    @property
    def gathers_in_compute_dtype(self) -> bool:
        """Return False: `fully_shard` gathers the weights in fp32. The residual stream has the precision of the
        weights, and is to stay in fp32."""
        return False

    def _sequences(self, sequences: int, seq_len: int) -> float:
        """Return the number of sequences of length `self.seq_len`, with which the sizes were measured, that hold as
        many tokens as `sequences` sequences of length `seq_len`."""
        return sequences * seq_len / self.seq_len
