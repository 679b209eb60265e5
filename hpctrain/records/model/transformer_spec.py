"""Base class of the Transformer families.

A model has `layers` blocks between an embedding and a head: the first stage holds the embedding, the last stage the
last norm and the head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from hpctrain.records.format.bounds import HEADS_MAX, VOCAB_MAX, WIDTH_MAX
from hpctrain.records.format.document import content_sha256
from hpctrain.records.model.block_stack import BlockStack


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
