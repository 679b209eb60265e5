"""What the stages of all families have in common: parts that may be absent, and a head that may be the embedding."""

from __future__ import annotations

from torch import nn


class TransformerPart(nn.Module):
    """Blocks [start, stop) of a Transformer, with what lies in front of and behind them where they are at its ends.

    Parameter names hold the global block number, so they are the same however the model is cut. A tied head's matrix
    is called embedding.weight wherever it lies; a last stage that is not the first holds a copy of it under that name.
    """

    embedding: nn.Embedding | None
    layers: nn.ModuleDict
    norm: nn.Module | None
    head: nn.Linear | None
    tied_here: bool
    """The head is here and uses the embedding's matrix."""

    def tie(self) -> None:
        """Make a tied head's matrix the very parameter of the embedding. To be called again after anything that
        replaces parameters: moving off the meta device, splitting them over devices."""
        if self.tied_here and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight
