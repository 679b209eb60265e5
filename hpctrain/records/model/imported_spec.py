"""A model from a factory in the user's own code: how it is built, and its measured sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from hpctrain.records.format.document import SEQ_MAX, VOCAB_MAX, Part
from hpctrain.records.model.block_stack import BlockStack
from hpctrain.records.model.families import FamilySpec

Split = Literal["columns", "rows"]
"""How tensor parallelism splits a linear layer (Shoeybi et al. 2019). columns: each device computes a part of the
layer's outputs. rows: each device takes a part of the layer's inputs, and the partial results are summed."""


class PartSizes(Part):
    """Measured parameters, FLOPs and activation bytes of a part of an imported model: of its front, a block or its
    back."""

    parameters: int = Field(ge=0)
    """Number of parameters in the part's weights."""
    flops: int = Field(ge=0)
    """FLOPs of a forward pass over one sequence."""
    activation_bytes: int = Field(ge=0)
    """Bytes of activations that the part keeps for the backward pass of one sequence, in fp32."""


class ImportedSpec(BlockStack):
    """A model from a factory in the user's own code (`model.import`), with its measured sizes. The model consists of
    front modules, equal blocks and back modules."""

    factory: str
    """The function that builds the model, 'package.module:factory'."""
    args: dict[str, Any] = {}
    """Keyword arguments of the factory, in addition to `vocabulary` and `seq_len`."""
    front: list[str]
    """Names of the modules that turn tokens [batch, seq] into the hidden state [batch, seq, dim], in order."""
    blocks: str
    """Name of the module that contains the blocks; each block maps hidden state to hidden state."""
    back: list[str]
    """Names of the modules that turn the hidden state into logits [batch, seq, vocab], in order."""
    tensor_parallel: dict[str, Split] = {}
    """How tensor parallelism splits the linear layers of a block: name within the block -> columns or rows."""
    seq_len: int = Field(ge=1, le=SEQ_MAX)
    """Tokens in a sequence when the sizes were measured."""
    tokens: int = Field(ge=2, le=VOCAB_MAX)
    """Size of the data's vocabulary, as passed to the factory."""
    vocab: int = Field(ge=2, le=VOCAB_MAX)
    """Width of the logits, at least `tokens`."""
    front_sizes: PartSizes
    """Sizes of the front modules together."""
    block_sizes: PartSizes
    """Sizes of one block."""
    back_sizes: PartSizes
    """Sizes of the back modules together, without a weight that is counted with the front modules."""
    split_parameters: int = Field(default=0, ge=0)
    """Parameters of a block that tensor parallelism splits."""
    split_activation_bytes: int = Field(default=0, ge=0)
    """Bytes, in fp32 and for one sequence, of those activations of a block that tensor parallelism splits."""
    tensor_parallel_degrees: list[int] = []
    """Values of `tp` for which hpctrain tested that a split block computes the same as a whole one."""
    tied: bool = False
    """Whether front and back modules share a weight."""
    weights_sha256: str
    """SHA-256 of the names and shapes of all weights."""

    def sha256(self) -> str:
        """Return the SHA-256 of the names and shapes of all weights; weights fit only models with the same hash."""
        return self.weights_sha256

    @property
    def vocabulary(self) -> int:
        return self.vocab

    def block_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters that one of `tp` devices holds of one block."""
        return self.block_sizes.parameters - self.split_parameters + self.split_parameters // tp

    def embedding_parameters(self) -> int:
        """Return the number of parameters of front or back modules, whichever have more: it is unknown which module of
        an imported model is the embedding."""
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
        """Return {}: no weight is in two stages, because hpctrain does not cut a model whose front and back modules
        share a weight."""
        return {}

    def activation_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of activations that one block keeps for its backward pass, on one of `tp` devices, for a
        micro-batch of `sequences` sequences and numbers of `bytes_per_value` bytes."""
        whole = self.block_sizes.activation_bytes - self.split_activation_bytes
        saved = whole + self.split_activation_bytes / tp
        return int(self._sequences(sequences, seq_len) * saved * bytes_per_value / 4)

    def residual_stream_bytes(self, sequences: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """Return the bytes of a block's activations that tensor parallelism does not split, for a micro-batch of
        `sequences` sequences. Each device holds these activations whole."""
        whole = self.block_sizes.activation_bytes - self.split_activation_bytes
        return int(self._sequences(sequences, seq_len) * whole * bytes_per_value / 4)

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
        """Return 1, because tensor parallelism does not split front and back modules of an imported model."""
        return 1

    def tensor_parallel_error(self, tp: int) -> str | None:
        """Return why the blocks cannot be split over `tp` devices; None if they can."""
        if tp == 1 or tp in self.tensor_parallel_degrees:
            return None
        if not self.tensor_parallel:
            return "model.tensor_parallel does not say how the linears of a block are split"
        allowed = ", ".join(map(str, self.tensor_parallel_degrees))
        return f"split as model.tensor_parallel says, a block was seen to be right on {allowed} devices only"

    def pipeline_error(self, stages: int) -> str | None:
        """Return why the model cannot be cut into this number of stages; None if it can."""
        if self.tied and stages > 1:
            return "front and back of the imported model share a weight, which cannot lie in two stages"
        return None

    @property
    def supports_sequence_parallel(self) -> bool:
        """Return False, because it is unknown which modules of an imported model are norms."""
        return False

    @property
    def gathers_in_compute_dtype(self) -> bool:
        """Return False: `fully_shard` gathers the weights of an imported model in fp32. The residual stream of an
        imported model has the precision of its weights, and is to stay in fp32."""
        return False

    def _sequences(self, sequences: int, seq_len: int) -> float:
        """Return the number of sequences of length `self.seq_len`, with which the sizes were measured, that hold as
        many tokens as `sequences` sequences of length `seq_len`."""
        return sequences * seq_len / self.seq_len


Spec = FamilySpec | ImportedSpec
"""Specification of any model, of a family or imported, for the planner and the workers."""
