"""What the shapes of all families have in common.

A model is `layers` blocks between an embedding and a head: the first stage holds the embedding, the last one the last
norm and the head.
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
    """Make `family` a required key in the schema for editors: only a decoder does without, and a schema has to tell the
    families apart."""
    schema["required"] = [*schema.get("required", []), "family"]


class TransformerSpec(BlockStack):
    """A Transformer by its dimensions; each family adds its own and counts what its blocks hold."""

    dim: int = Field(ge=2, le=WIDTH_MAX)
    """Width of the residual stream."""
    heads: int = Field(ge=1, le=HEADS_MAX)
    """Attention heads; `dim` is a multiple of it."""
    vocab: int | None = Field(default=None, ge=2, le=VOCAB_MAX)
    """Size of the vocabulary. Default: that of the tokenizer of the data."""
    tied: bool = False
    """The head uses the embedding's matrix."""

    def sha256(self) -> str:
        """Hash of the dimensions: weights fit models with the same hash only."""
        return content_sha256(self)

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary; ask only after the data has settled it."""
        assert self.vocab is not None, "the vocabulary is settled when a run file meets its data"
        return self.vocab

    @property
    @abstractmethod
    def hidden(self) -> int:
        """Width inside the feed-forward layer."""

    def embedding_parameters(self) -> int:
        """Parameters of the table of tokens."""
        return self.vocabulary * self.dim

    def head_shards(self, tp: int) -> int:
        """Parts that embedding and head are cut into: by vocabulary where that divides, else they are whole."""
        return tp if self.vocabulary % tp == 0 else 1

    def shared_weights(self, cuts: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
        """By name, the stages that hold a copy of a weight, where it is more than one.

        Args:
            cuts: the blocks [from, to) of each stage.
        """
        return {"embedding.weight": [0, len(cuts) - 1]} if self.tied and len(cuts) > 1 else {}

    def logits_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """What the head and the loss keep: logits, their log-softmax and the gradient of one of them."""
        return int(3 * sequences * self.target_length(seq_len) * self.vocabulary * bytes_per_value / tp)

    def tensor_parallel_error(self, tp: int) -> str | None:
        """None when the blocks can be cut into `tp` parts, else the reason."""
        for name, size in (("heads", self.heads), ("feed-forward width", self.hidden)):
            if size % tp:
                return f"{name} {size} is not a multiple of tp {tp}"
        return None

    @property
    def supports_sequence_parallel(self) -> bool:
        """Whether norms and the residual stream can be split along the sequence, beside tensor parallelism."""
        return True

    @property
    def gathers_in_compute_dtype(self) -> bool:
        """Whether sharded weights are cast to the precision of matrix products before they are gathered."""
        return True
