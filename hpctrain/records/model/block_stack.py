"""Base classes of models: a stack of blocks between two ends, with the sizes that planner and workers need of it.

A stage holds blocks [from, to). The first stage also holds what precedes the blocks (in a Transformer the embedding),
the last one what follows them (the last norm and the head). Nothing here needs torch: sizes are computed without
building the model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from hpctrain.records.format.document import HEADS_MAX, LAYERS_MAX, VOCAB_MAX, WIDTH_MAX, Part, content_sha256


class BlockStack(Part):
    """Base class of all model specifications; its methods return what is right for most families."""

    layers: int = Field(ge=1, le=LAYERS_MAX)
    """Number of blocks."""

    dim: int = Field(ge=1, le=WIDTH_MAX)
    """Width of a stage message."""

    @abstractmethod
    def block_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters of one block on one of `tp` devices: matrices are split, norms are whole on
        each."""

    @abstractmethod
    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters of a stage outside its blocks, at the front (first) and the back (last) of
        the model, on one of `tp` devices. A tied matrix counts once in a stage with both ends; where the model is cut,
        each end has a copy."""

    @abstractmethod
    def forward_flops(self, sequences: int, seq_len: int, start: int = 0) -> float:
        """Return the FLOPs of a forward pass over `sequences` through the blocks from `start` on, and through the head;
        the backward pass takes twice as many. Matrix products take 2 FLOPs per parameter and token, plus the FLOPs of
        attention (Korthikanti et al. 2022, appendix A, without the recompute term)."""

    @abstractmethod
    def activation_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of activations that one block keeps for its backward pass, for one micro-batch of
        `sequences`."""

    @abstractmethod
    def residual_stream_bytes(self, sequences: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """Return the part of `activation_bytes` that tensor parallelism does not split."""

    @abstractmethod
    def matmul_output_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of the outputs of one block's matrix products and attention for these sequences, on one of
        `tp` devices. Selective recomputation keeps them, as torch's selective activation checkpointing does."""

    def parameters(self, start: int = 0, stop: int | None = None, tp: int = 1) -> int:
        """Return the number of parameters of the blocks [start, stop), and of embedding and head where the stage holds
        them, on one of `tp` devices."""
        stop = self.layers if stop is None else stop
        ends = self.end_parameters(tp, first=start == 0, last=stop == self.layers)
        return (stop - start) * self.block_parameters(tp) + ends

    def stage_parameters(self, blocks: int, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters of a stage, given its number of blocks and whether it is the model's first or
        last one. Where blocks differ, it is the most that such a stage can hold."""
        return blocks * self.block_parameters(tp) + self.end_parameters(tp, first=first, last=last)

    def mean_blocks(self, blocks: int, seq_len: int, *, first: bool, last: bool) -> tuple[float, float]:
        """Return the size of a stage in blocks of mean size: (by FLOPs, by activations kept for the backward pass)."""
        return blocks, blocks

    @property
    def preferred_cut(self) -> int | None:
        """Return the number of the block before which a cut sends the fewest bytes; None where all cuts send the
        same."""
        return None

    def stage_boundary_bytes(
        self, sequences: int, seq_len: int, bytes_per_value: int = 4, cut: int | None = None
    ) -> int:
        """Return the bytes of the activation [batch, seq, dim] that is sent between two stages.

        Args:
            cut: the block before which the model is cut; None: the largest of all cuts.
        """
        return sequences * self.boundary_length(seq_len, cut) * self.dim * bytes_per_value

    def boundary_length(self, seq_len: int, cut: int | None = None) -> int:
        """Return the sequence positions in a stage message, with the model cut before block `cut` (None: the largest of
        all cuts)."""
        return seq_len

    def selective_flops(self, sequences: int, seq_len: int) -> float:
        """Return the FLOPs of a block's matrix products that selective recomputation repeats: 0, because their results
        are kept."""
        return 0.0

    def selective_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes that the operations repeated by selective recomputation process: all of a block's
        activations."""
        return self.activation_bytes(sequences, seq_len, tp, bytes_per_value)

    def target_length(self, seq_len: int) -> int:
        """Return the number of positions of a sequence for which the head computes logits."""
        return seq_len

    def pipeline_error(self, stages: int) -> str | None:
        """Return why the model cannot be cut into that many stages; None when it can."""
        return None

    def sequence_length_error(self, seq_len: int) -> str | None:
        """Return why the model cannot take sequences of that length; None when it can."""
        return None

    @property
    def can_split_backward(self) -> bool:
        """Whether a stage's backward pass can be split into one for inputs (I) and one for weights (W)."""
        return True


def require_family(schema: dict[str, Any]) -> None:
    """Make `family` a required key in the schema for editors: only a decoder may leave the key out, and editors need it
    to tell the families apart."""
    schema["required"] = [*schema.get("required", []), "family"]


class TransformerSpec(BlockStack):
    """A Transformer by its dimensions; each family adds its own dimensions and counts."""

    dim: int = Field(ge=2, le=WIDTH_MAX)
    """Width of the residual stream."""
    heads: int = Field(ge=1, le=HEADS_MAX)
    """Attention heads; `dim` is a multiple of it."""
    vocab: int | None = Field(default=None, ge=2, le=VOCAB_MAX)
    """Size of the vocabulary. Default: that of the data's tokenizer."""
    tied: bool = False
    """The head uses the embedding's matrix."""

    def sha256(self) -> str:
        """Return the hash of the dimensions; weights fit only models with the same hash."""
        return content_sha256(self)

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary; only valid once the data has determined it."""
        assert self.vocab is not None, "the vocabulary is settled when a run file meets its data"
        return self.vocab

    @property
    @abstractmethod
    def hidden(self) -> int:
        """Width inside the feed-forward layer."""

    def embedding_parameters(self) -> int:
        """Return the number of parameters of the token embedding."""
        return self.vocabulary * self.dim

    def head_shards(self, tp: int) -> int:
        """Return the number of parts that embedding and head are split into along the vocabulary; 1 where `tp` does not
        divide it."""
        return tp if self.vocabulary % tp == 0 else 1

    def shared_weights(self, cuts: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
        """Return weight name -> stages that hold a copy, for weights in more than one stage.

        Args:
            cuts: the blocks [from, to) of each stage.
        """
        return {"embedding.weight": [0, len(cuts) - 1]} if self.tied and len(cuts) > 1 else {}

    def logits_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes that the head and the loss keep: logits, their log-softmax and the gradient of one of
        them."""
        return int(3 * sequences * self.target_length(seq_len) * self.vocabulary * bytes_per_value / tp)

    def tensor_parallel_error(self, tp: int) -> str | None:
        """Return why the blocks cannot be split into `tp` parts; None when they can."""
        for name, size in (("heads", self.heads), ("feed-forward width", self.hidden)):
            if size % tp:
                return f"{name} {size} is not a multiple of tp {tp}"
        return None

    @property
    def supports_sequence_parallel(self) -> bool:
        """Whether sequence parallelism can be used together with tensor parallelism."""
        return True

    @property
    def gathers_in_compute_dtype(self) -> bool:
        """Whether sharded weights are cast to the precision of matrix products before they are gathered."""
        return True
