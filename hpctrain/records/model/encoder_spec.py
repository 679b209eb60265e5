"""An encoder like BERT, trained to predict masked tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from hpctrain.records.format.bounds import SEQ_MAX
from hpctrain.records.model.biased_spec import BiasedSpec
from hpctrain.records.model.transformer_spec import require_family

SEGMENTS = 2
"""Rows of BERT's segment embedding; a text without pairs of sentences uses only the first."""


class EncoderSpec(BiasedSpec):
    """An encoder-only Transformer after Devlin et al. 2019: LayerNorm after each layer, GELU, and a head with a matrix,
    GELU and norm before the output embedding."""

    model_config = ConfigDict(json_schema_extra=require_family)

    family: Literal["encoder"] = "encoder"
    """The kind of Transformer."""
    positions: int = Field(default=512, ge=1, le=SEQ_MAX)
    """Learned positions: the longest sequence."""
    norm_eps: float = Field(default=1e-12, gt=0)
    """Added to the variance in LayerNorm."""

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters of embedding, positions, segments and their norm (first), and of the head
        (last), on one of `tp` devices; the matrix in the head is whole on each."""
        shards = self.head_shards(tp)
        front = (self.positions + SEGMENTS + 2) * self.dim
        back = self.dim * self.dim + 3 * self.dim + self.vocabulary // shards
        return self.tables(first, last) * self.embedding_parameters() // shards + front * first + back * last

    def head_flops(self, tokens: int) -> float:
        return 2.0 * tokens * (self.vocabulary + self.dim) * self.dim
