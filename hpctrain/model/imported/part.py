"""The blocks of any stage module, built-in or imported, numbered over the whole model."""

from __future__ import annotations

from torch import nn

from hpctrain.model.imported.model import ImportedPart, numbered_blocks


def blocks_of(module: nn.Module) -> dict[int, nn.Module]:
    """The blocks of a stage by their number in the whole model, in order."""
    if isinstance(module, ImportedPart):
        return numbered_blocks(module)
    return {int(name): block for name, block in module.layers.named_children()}  # type: ignore[union-attr]
