"""A model from a factory in the user's own code: how it is built, and its measured sizes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hpctrain.records.format.document import VOCAB_MAX
from hpctrain.records.model.families import FamilySpec
from hpctrain.records.model.measured_stack import MeasuredStack
from hpctrain.records.model.transformers_spec import TransformersSpec

Split = Literal["columns", "rows"]
"""How tensor parallelism splits a linear layer (Shoeybi et al. 2019). columns: each device computes a part of the
layer's outputs. rows: each device takes a part of the layer's inputs, and the partial results are summed."""


class ImportedSpec(MeasuredStack):
    """A model from a factory in the user's own code (`model.import`), with its measured sizes. The model consists of
    front modules, equal blocks and back modules."""

    factory: str
    """The function that builds the model, 'package.module:factory'."""
    args: dict[str, Any] = {}
    """Keyword arguments of the factory, in addition to `vocabulary` and `seq_len`."""
    front: list[str]
    """Paths of the modules that turn tokens [batch, seq] into the hidden state [batch, seq, dim], in order."""
    blocks: str
    """Path of the module that contains the blocks; each block maps hidden state to hidden state."""
    back: list[str]
    """Paths of the modules that turn the hidden state into logits [batch, seq, vocab], in order."""
    tensor_parallel: dict[str, Split] = {}
    """How tensor parallelism splits the linear layers of a block: name within the block -> columns or rows."""
    tokens: int = Field(ge=2, le=VOCAB_MAX)
    """Size of the data's vocabulary, as passed to the factory."""
    split_parameters: int = Field(default=0, ge=0)
    """Parameters of a block that tensor parallelism splits."""
    split_activation_bytes: int = Field(default=0, ge=0)
    """Bytes, in fp32 and for one sequence, of those activations of a block that tensor parallelism splits."""
    tensor_parallel_degrees: list[int] = []
    """Values of `tp` for which hpctrain tested that a split block computes the same as a whole one."""
    tied: bool = False
    """Whether front and back modules share a weight."""

    def block_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters that one of `tp` devices holds of one block."""
        return self.block_sizes.parameters - self.split_parameters + self.split_parameters // tp

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


Spec = FamilySpec | ImportedSpec | TransformersSpec
"""Specification of any model, of a family, imported, or of transformers, for the planner and the workers."""
