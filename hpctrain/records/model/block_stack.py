"""Base classes of model specifications, from which planner and workers get a model's sizes.

A model is a stack of blocks between two ends. A stage holds blocks [from, to). The first stage also holds what precedes
the blocks (in a Transformer the embedding), the last one what follows the blocks (the last norm and the head). Sizes
are computed without torch and without building the model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, model_validator

from hpctrain.records.format.document import HEADS_MAX, LAYERS_MAX, VOCAB_MAX, WIDTH_MAX, Part, content_sha256


class BlockStack(Part):
    """Base class of all model specifications. A method that a family does not override returns what is right for most
    families."""

    layers: int = Field(ge=1, le=LAYERS_MAX)
    """Number of blocks."""

    dim: int = Field(ge=1, le=WIDTH_MAX)
    """Width of the hidden state, and so of a stage message."""

    @abstractmethod
    def block_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters that one of `tp` devices holds of one block: the mean, rounded up, if blocks
        differ. In the families that hpctrain builds, matrices are split over the devices, and every device holds whole
        norms."""

    @abstractmethod
    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters that one of `tp` devices holds of a stage outside its blocks.

        A tied matrix counts once in a stage that is both first and last; in other stages each end has a copy.

        Args:
            first: whether the stage is the model's first one, with what precedes the blocks.
            last: whether the stage is the model's last one, with what follows the blocks.
        """

    @abstractmethod
    def forward_flops(self, sequences: int, seq_len: int, start: int = 0) -> float:
        """Return the FLOPs of a forward pass of `sequences` sequences through the blocks from number `start` on, and
        through the head; the backward pass takes twice as many. Matrix products take 2 FLOPs per parameter and token;
        the FLOPs of attention are added (Korthikanti et al. 2022, appendix A, without recomputation)."""

    @abstractmethod
    def activation_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of activations that one block keeps for its backward pass, on one of `tp` devices, for a
        micro-batch of `sequences` sequences and numbers of `bytes_per_value` bytes."""

    @abstractmethod
    def residual_stream_bytes(self, sequences: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """Return the part of `activation_bytes` that tensor parallelism does not split, so that each device holds it
        whole. Sequence parallelism splits this part."""

    @abstractmethod
    def matmul_output_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of the outputs of one block's matrix products and attention, on one of `tp` devices, for a
        micro-batch of `sequences` sequences. Selective recomputation keeps these outputs, as torch's selective
        activation checkpointing does."""

    @property
    def attention_share(self) -> float:
        """Return the share of a block's parameters that its attention has; a third, as in a block with a feed-forward
        layer four times as wide as the residual stream, if it is not known."""
        return 1 / 3

    def parameters(self, start: int = 0, stop: int | None = None, tp: int = 1) -> int:
        """Return the number of parameters that one of `tp` devices holds of the blocks [start, stop), with the
        embedding if the blocks begin with the model's first and the head if they end with the last. `stop` None: all
        blocks from `start` on."""
        stop = self.layers if stop is None else stop
        ends = self.end_parameters(tp, first=start == 0, last=stop == self.layers)
        return (stop - start) * self.block_parameters(tp) + ends

    def stage_parameters(self, blocks: int, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters that one of `tp` devices holds of a stage with this number of blocks, which
        is the model's `first` or `last` stage, or neither. In a model with unlike blocks, it is the most that such a
        stage can hold."""
        return blocks * self.block_parameters(tp) + self.end_parameters(tp, first=first, last=last)

    def mean_blocks(self, blocks: int, seq_len: int, *, first: bool, last: bool) -> tuple[float, float]:
        """Return two sizes of a stage, each as a number of blocks of mean size: (by FLOPs, by activations kept for the
        backward pass). Both equal `blocks` if all blocks of the model are alike.

        Args:
            blocks: number of blocks of the stage.
            seq_len: tokens of a sequence.
            first: whether the stage holds the embedding.
            last: whether the stage holds the last norm and the head.
        """
        return blocks, blocks

    @property
    def preferred_cut(self) -> int | None:
        """Return the number of the block before which a cut makes the smallest stage messages; None if the messages of
        all cuts have the same size."""
        return None

    def stage_boundary_bytes(
        self, sequences: int, seq_len: int, bytes_per_value: int = 4, cut: int | None = None
    ) -> int:
        """Return the bytes of a stage message for a micro-batch: the activation [sequences, positions, dim].

        Args:
            cut: number of the block before which the model is cut; None: the cut with the largest messages.
        """
        return sequences * self.boundary_length(seq_len, cut) * self.dim * bytes_per_value

    def boundary_length(self, seq_len: int, cut: int | None = None) -> int:
        """Return the number of sequence positions in a stage message, with the model cut before block number `cut`
        (None: the cut with the largest messages)."""
        return seq_len

    def selective_flops(self, sequences: int, seq_len: int) -> float:
        """Return the FLOPs of the matrix products of a block that selective recomputation repeats: 0, because it keeps
        the results of matrix products."""
        return 0.0

    def selective_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of memory traffic of selective recomputation in one block, on one of `tp` devices: about the
        size of all activations that the block keeps without recomputation."""
        return self.activation_bytes(sequences, seq_len, tp, bytes_per_value)

    def attention_products(self, sequences: int, seq_len: int) -> float:
        """Return the number of products of a query's and a key's number in the forward pass of a block of mean size,
        over all heads; 0 if it is not known."""
        return 0.0

    def touched_score_bytes(
        self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4
    ) -> tuple[float, float] | None:
        """Return the bytes of attention scores in memory that the forward and the backward pass of a block read and
        write, on one of `tp` devices; None if one kernel computes attention (fused attention) and keeps no scores in
        memory."""
        return None

    def kept_score_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the part of `activation_bytes` that attention scores are; 0 if one kernel computes attention."""
        return 0

    def target_length(self, seq_len: int) -> int:
        """Return the number of positions for which the head computes logits, in one sequence of `seq_len` tokens."""
        return seq_len

    def pipeline_error(self, stages: int) -> str | None:
        """Return why the model cannot be cut into this number of stages; None if it can."""
        return None

    def sequence_length_error(self, seq_len: int) -> str | None:
        """Return why the model cannot take sequences of `seq_len` tokens; None if it can."""
        return None

    @property
    def can_split_backward(self) -> bool:
        """Return whether the backward pass of a stage can be split into one for inputs (I) and one for weights (W), as
        zero-bubble schedules need."""
        return True


def require_family(schema: dict[str, Any]) -> None:
    """Make `family` a required key in the JSON schema of a family other than the decoder. Editors tell the families
    apart by this key, which only a decoder may leave out."""
    schema["required"] = [*schema.get("required", []), "family"]


class TransformerSpec(BlockStack):
    """Base class of the dimensions of the Transformers that hpctrain builds. Each family adds its own dimensions, and
    the functions that count its parameters and FLOPs."""

    dim: int = Field(ge=2, le=WIDTH_MAX)
    """Width of the residual stream."""
    heads: int = Field(ge=1, le=HEADS_MAX)
    """Number of attention heads in a block."""
    vocab: int | None = Field(default=None, ge=2, le=VOCAB_MAX)
    """Size of the vocabulary. Default: the vocabulary of the data's tokenizer."""
    tied: bool = False
    """Whether the head uses the embedding's matrix."""
    padding_id: int | None = Field(default=None, ge=0, lt=VOCAB_MAX)
    """Token whose embedding gets no gradient from inputs, as `padding_idx` of torch's `nn.Embedding`; a tied head still
    trains it. None: there is no such token."""

    @model_validator(mode="after")
    def _padding_is_a_token(self) -> TransformerSpec:
        if self.vocab is not None and (reason := self.vocabulary_error(self.vocab)):
            raise ValueError(reason)
        return self

    def vocabulary_error(self, vocabulary: int) -> str | None:
        """Return why the model cannot have a vocabulary of this size; None if it can."""
        if self.padding_id is None or self.padding_id < vocabulary:
            return None
        return f"padding_id {self.padding_id} is no token: the vocabulary has {vocabulary}"

    def sha256(self) -> str:
        """Return the SHA-256 of the dimensions; weights fit only models with the same hash."""
        return content_sha256(self)

    @property
    def vocabulary(self) -> int:
        """Return the size of the vocabulary. It must be known: given in run.yaml or read from the data's tokenizer."""
        assert self.vocab is not None, "the vocabulary is settled when a run file meets its data"
        return self.vocab

    @property
    @abstractmethod
    def hidden(self) -> int:
        """Return the width inside the feed-forward layer."""

    def embedding_parameters(self) -> int:
        """Return the number of parameters of the token embedding."""
        return self.vocabulary * self.dim

    def head_shards(self, tp: int) -> int:
        """Return the number of parts into which `tp` devices split embedding and head along the vocabulary: `tp`, or 1
        if `tp` does not divide the size of the vocabulary."""
        return tp if self.vocabulary % tp == 0 else 1

    def shared_weights(self, cuts: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
        """Return name of a weight -> numbers of the stages that hold a copy, for each weight that several stages hold.

        Args:
            cuts: the blocks [from, to) of each stage, in order.
        """
        return {"embedding.weight": [0, len(cuts) - 1]} if self.tied and len(cuts) > 1 else {}

    def logits_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes that head and loss take on one of `tp` devices that split the vocabulary (`head_shards`),
        for a micro-batch: three tensors of the size of the logits (the logits, their log-softmax, and a gradient)."""
        return int(3 * sequences * self.target_length(seq_len) * self.vocabulary * bytes_per_value / tp)

    def tensor_parallel_error(self, tp: int) -> str | None:
        """Return why the blocks cannot be split over `tp` devices; None if they can."""
        for name, size in (("heads", self.heads), ("feed-forward width", self.hidden)):
            if size % tp:
                return f"{name} {size} is not a multiple of tp {tp}"
        return None

    @property
    def supports_sequence_parallel(self) -> bool:
        """Return whether sequence parallelism can be used together with tensor parallelism."""
        return True

    @property
    def gathers_in_compute_dtype(self) -> bool:
        """Return whether `fully_shard` casts sharded weights to the precision of matrix products before it gathers
        them."""
        return True


class EqualBlocks(TransformerSpec):
    """Base class of the families whose blocks are all alike, with a residual stream of width d (`dim`)."""

    hidden_by_mask: ClassVar[float] = 0.5
    """Share of the attention scores that are not computed because a mask hides them: with a causal mask, the scores of
    later tokens are half of all."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> EqualBlocks:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        return self

    @property
    def head_width(self) -> int:
        return self.dim // self.heads

    @property
    @abstractmethod
    def block_weights(self) -> int:
        """Return the number of weights in the matrices of one block."""

    @abstractmethod
    def split_values(self, seq_len: int) -> tuple[int, int]:
        """Return two counts of numbers per token in those tensors of a block that tensor parallelism splits, over all
        devices together: (all numbers that the backward pass needs; those of them that are results of matrix products
        or attention). The attention scores of a token are as many as its sequence has tokens (`seq_len`)."""

    def tables(self, first: bool, last: bool) -> int:
        """Return how many embedding and head matrices a stage holds, given whether it is the model's first and whether
        it is the last. A tied matrix counts once."""
        return int(first or last) if self.tied else int(first) + int(last)

    def forward_flops(self, sequences: int, seq_len: int, start: int = 0) -> float:
        """Return the FLOPs of a forward pass of `sequences` sequences through the blocks from number `start` on, and
        through the head. Attention takes 4·s·d FLOPs per token and block, less the share of the scores that a mask
        hides (s: `seq_len`, d: width of all query heads together)."""
        tokens = sequences * seq_len
        scores = 4.0 * seq_len * self.heads * self.head_width * (1 - self.hidden_by_mask)
        return (self.layers - start) * tokens * (2.0 * self.block_weights + scores) + self.head_flops(tokens)

    def head_flops(self, tokens: int) -> float:
        """Return the FLOPs of the head's matrix products in a forward pass of this number of tokens."""
        return 2.0 * tokens * self.vocabulary * self.dim

    def attention_products(self, sequences: int, seq_len: int) -> float:
        scores = sequences * seq_len * seq_len * (1 - self.hidden_by_mask)
        return scores * self.heads * self.head_width

    @property
    def norm_values(self) -> int:
        """Return how many numbers the inputs and outputs of the norms of a block have per token."""
        return 4 * self.dim

    def activation_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of activations that one block keeps for its backward pass, on one of `tp` devices, for a
        micro-batch of `sequences` sequences: inputs and outputs of the norms, and 1/`tp` of the tensors that tensor
        parallelism splits."""
        backward, _ = self.split_values(seq_len)
        return int(sequences * seq_len * bytes_per_value * (self.norm_values + backward / tp))

    def residual_stream_bytes(self, sequences: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """Return the part of `activation_bytes` that tensor parallelism does not split: inputs and outputs of the
        norms of a block."""
        return sequences * seq_len * bytes_per_value * self.norm_values

    def matmul_output_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of the results of a block's matrix products and attention, on one of `tp` devices, for a
        micro-batch. Selective recomputation keeps these results. Each device holds the whole outputs of the two
        projections into the residual stream, of attention and feed-forward (2·`dim` numbers per token)."""
        _, results = self.split_values(seq_len)
        return int(sequences * seq_len * bytes_per_value * (2 * self.dim + results / tp))
