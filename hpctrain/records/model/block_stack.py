"""A model as a stack of blocks between two ends, and the questions that planner and workers ask of any.

A stage holds blocks [from, to); the first stage also holds what stands before them, the last one what comes after.
Nothing here needs torch: a model is sized without building it.
"""

from __future__ import annotations

from abc import abstractmethod

from pydantic import Field

from hpctrain.records.format.bounds import LAYERS_MAX, WIDTH_MAX
from hpctrain.records.format.document import Part


class BlockStack(Part):
    """What is known of a model without its family; answers that most models share stand here."""

    layers: int = Field(ge=1, le=LAYERS_MAX)
    """Number of blocks."""

    dim: int = Field(ge=1, le=WIDTH_MAX)
    """Width of what travels between two stages."""

    @abstractmethod
    def block_parameters(self, tp: int = 1) -> int:
        """Parameters of one block on one of `tp` devices: matrices are split, norms are whole on each."""

    @abstractmethod
    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Parameters of a stage beside its blocks, at the front (first) and at the back (last) of the model, on one of
        `tp` devices. A tied matrix counts once in a stage with both ends; where the model is cut, each end holds a
        copy of it."""

    @abstractmethod
    def forward_flops(self, sequences: int, seq_len: int, start: int = 0, stop: int | None = None) -> float:
        """FLOPs of a forward pass over `sequences` through blocks [start, stop) and, at the last of them, the
        head; backward costs twice that. Matrix products 2 FLOPs per parameter and token, and those of attention
        (Korthikanti et al. 2022, appendix A, without the recompute term)."""

    @abstractmethod
    def activation_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """What one block keeps for its backward pass, for one micro-batch of `sequences`."""

    @abstractmethod
    def residual_stream_bytes(self, sequences: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """The part of `activation_bytes` that tensor parallelism leaves whole."""

    @abstractmethod
    def matmul_output_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Results of a block's matrix products and attention, which selective recomputation keeps."""

    def parameters(self, start: int = 0, stop: int | None = None, tp: int = 1) -> int:
        """Parameters of the blocks [start, stop), with embedding and head where they belong, on one of `tp` devices."""
        stop = self.layers if stop is None else stop
        ends = self.end_parameters(tp, first=start == 0, last=stop == self.layers)
        return (stop - start) * self.block_parameters(tp) + ends

    def stage_parameters(self, blocks: int, tp: int = 1, *, first: bool, last: bool) -> int:
        """As `parameters`, of a stage by its number of blocks and the ends it has; where it may lie anywhere between
        them, the most that such a stage holds."""
        return blocks * self.block_parameters(tp) + self.end_parameters(tp, first=first, last=last)

    def mean_blocks(self, blocks: int, seq_len: int, *, first: bool, last: bool) -> tuple[float, float]:
        """How many blocks of mean size a stage amounts to: in FLOPs, and in what it keeps for the backward pass."""
        return blocks, blocks

    @property
    def preferred_cut(self) -> int | None:
        """The block before which a model is cut best, where one of the cuts has less to send than others."""
        return None

    def stage_boundary_bytes(
        self, sequences: int, seq_len: int, bytes_per_value: int = 4, cut: int | None = None
    ) -> int:
        """Size of the activation [batch, seq, dim] that travels between two stages.

        Args:
            cut: the block before which the model is cut; None: the largest of all cuts.
        """
        return sequences * self.boundary_length(seq_len, cut) * self.dim * bytes_per_value

    def boundary_length(self, seq_len: int, cut: int | None = None) -> int:
        """Positions along the sequence of what travels between two stages; see `stage_boundary_bytes`."""
        return seq_len

    def selective_flops(self, sequences: int, seq_len: int) -> float:
        """Matrix products of a block that selective recomputation repeats: none, their results are kept."""
        return 0.0

    def selective_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """What the operations that selective recomputation repeats go through: all of a block's activations."""
        return self.activation_bytes(sequences, seq_len, tp, bytes_per_value)

    def target_length(self, seq_len: int) -> int:
        """Positions of a sequence that the head gives logits for."""
        return seq_len

    def pipeline_error(self, stages: int) -> str | None:
        """None when the model can be cut into that many stages, else the reason."""
        return None

    def sequence_length_error(self, seq_len: int) -> str | None:
        """None when the model takes sequences of that length, else the reason."""
        return None

    @property
    def can_split_backward(self) -> bool:
        """Whether a stage's backward can be cut into one for its inputs and one for its weights (I, W)."""
        return True
