"""A decoder like GPT-2."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from hpctrain.records.format.bounds import SEQ_MAX
from hpctrain.records.model.biased_spec import BiasedSpec
from hpctrain.records.model.transformer_spec import require_family


class Gpt2Spec(BiasedSpec):
    """A decoder-only Transformer after Radford et al. 2019: LayerNorm before each layer, GELU in its tanh form."""

    model_config = ConfigDict(json_schema_extra=require_family)

    family: Literal["gpt2"] = "gpt2"
    """The kind of Transformer."""
    positions: int = Field(default=1024, ge=1, le=SEQ_MAX)
    """Learned positions: the longest sequence."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance in LayerNorm."""

    @property
    def hidden_by_mask(self) -> float:
        """Return the share of the attention scores that is not computed: one half, the scores of later tokens."""
        return 0.5

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters of embedding and positions (first), last norm and head (last), on one of `tp`
        devices."""
        tables = self.tables(first, last) * self.embedding_parameters() // self.head_shards(tp)
        return tables + self.positions * self.dim * first + 2 * self.dim * last
