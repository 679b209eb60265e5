"""The base class of the stages of all families: parts may be absent, and the head may be tied to the embedding."""

from __future__ import annotations

from torch import nn


class TransformerPart(nn.Module):
    """Blocks [start, stop) of a Transformer; the first stage also holds the embedding, the last one the head.

    Parameter names contain the global block number, so they do not depend on the cut. A tied head's matrix is always
    called embedding.weight; a last stage that is not the first holds a copy under that name.
    """

    embedding: nn.Embedding | None
    layers: nn.ModuleDict
    norm: nn.Module | None
    head: nn.Linear | None
    tied_here: bool
    """Whether the head is in this stage and uses the embedding's matrix."""

    def tie(self) -> None:
        """Make a tied head use the embedding's parameter itself. Call it again after anything that replaces parameters:
        moving off the meta device, splitting them over devices."""
        if self.tied_here and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight
