"""Base classes of the stages of all families: parts of the model may be absent, and the head may be tied to the
embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from hpctrain.records.model.block_stack import TransformerSpec


class StageBlocks(NamedTuple):
    """The blocks [start, stop) of a stage, and whether it is the first or the last one; a stage without blocks may be
    either.
    """

    start: int
    stop: int
    first: bool
    last: bool


class TransformerPart(nn.Module):
    """Blocks [start, stop) of a Transformer; the first stage also holds the embedding, the last one the head.

    Parameter names contain the global block number, so they do not depend on the cut. A tied head's matrix is always
    called embedding.weight; a last stage that is not the first holds a copy under that name.
    """

    embedding: nn.Embedding | None
    layers: nn.ModuleDict
    norm: nn.Module | None
    head: nn.Linear | None

    def __init__(self, spec: TransformerSpec, blocks: StageBlocks) -> None:
        super().__init__()
        self.first = blocks.first
        self.tied_here = spec.tied and blocks.last
        """Whether this stage has the head and the head uses the embedding's matrix."""

    def tie(self) -> None:
        """Make a tied head use the embedding's parameter itself.

        Call it again after anything that replaces parameters, such as moving them off the meta device or splitting them
        over devices.
        """
        if self.tied_here and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight


class DecoderPart(TransformerPart):
    """A part of a decoder-only Transformer whose last stage has a norm and a head."""

    def __init__(
        self, spec: TransformerSpec, blocks: StageBlocks, make_block: Callable[[], nn.Module],
        make_norm: Callable[[], nn.Module], positions: nn.Module | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            positions: module that takes tokens and returns what is added to their embedding; None: nothing is added.
        """
        super().__init__(spec, blocks)
        held = blocks.first or self.tied_here
        self.embedding = nn.Embedding(spec.vocabulary, spec.dim) if held else None
        self.positions = positions
        self.layers = nn.ModuleDict({str(index): make_block() for index in range(blocks.start, blocks.stop)})
        self.norm = make_norm() if blocks.last else None
        self.head = nn.Linear(spec.dim, spec.vocabulary, bias=False) if blocks.last else None
        self.tie()

    def forward(self, x: Tensor) -> Tensor:
        """Return activations [batch, seq, dim], or logits in the last stage.

        Args:
            x: tokens [batch, seq] in the first stage, else activations [batch, seq, dim].
        """
        if self.first and self.embedding is not None:
            x = self.embedding(x) if self.positions is None else self.embedding(x) + self.positions(x)
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x
