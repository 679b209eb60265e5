"""Splits an imported model into front modules, blocks and back modules, and checks its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hpctrain.base.errors import InputError
from hpctrain.model.imported.factory import around, find_blocks, submodule
from hpctrain.model.imported.model import block_names


@dataclass(frozen=True)
class Pieces:
    """A model and the paths of its pieces."""

    model: nn.Module
    front: list[str]
    blocks: str
    back: list[str]

    @property
    def block_paths(self) -> list[str]:
        """Paths of the blocks in the model."""
        return block_names(self.model, self.blocks)

    def modules(self, paths: Iterable[str]) -> list[nn.Module]:
        """Return the modules at these paths."""
        return [self.model.get_submodule(path) for path in paths]


def split_into_pieces(model: nn.Module, front: list[str] | None, blocks: str | None, back: list[str] | None) -> Pieces:
    """Return the named pieces; by default, the only container of equal blocks and the modules before and after it.

    Raises:
        InputError: a name does not exist, or a piece was not named and is ambiguous.
    """
    blocks = blocks or find_blocks(model)
    container = submodule(model, blocks, "model.blocks")
    if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential) or not len(container):
        raise InputError(
            f"model.blocks: {blocks} is a {type(container).__name__} of {len(list(container.children()))} modules; "
            "allowed: a ModuleList, ModuleDict or Sequential with the blocks in it"
        )
    if len(list(container.children())) != len(container):
        raise InputError(f"model.blocks: {blocks} holds the same module more than once; each block needs its own")
    before, after = around(model, blocks)
    front, back = front or before, back or after
    for field, paths in (("model.front", front), ("model.back", back)):
        if not paths:
            raise InputError(f"{field}: nothing lies on that side of {blocks}; name the modules that are applied there")
        for path in paths:
            submodule(model, path, field)
    return Pieces(model, front, blocks, back)


def check_weights(pieces: Pieces) -> None:
    """Check the weights of the pieces.

    Every weight must belong to a piece, be fp32 and be trained. All blocks must have weights of the same names and
    shapes, and share none.

    Raises:
        InputError: a weight breaks one of these rules.
    """
    model, paths = pieces.model, pieces.block_paths
    shapes = [shapes_of(block) for block in pieces.modules(paths)]
    for path, block_shapes in zip(paths, shapes, strict=True):
        if block_shapes != shapes[0]:
            other = sorted(set(block_shapes.items()) ^ set(shapes[0].items()))[0]
            raise InputError(
                f"model.blocks: {path} is not like {paths[0]}: they differ in {other[0]} {list(other[1])}; all blocks "
                "need the same weights"
            )
    held = {id(w) for w in weights_of(pieces.modules([*pieces.front, *paths, *pieces.back]))}
    counts = sum(len({id(w) for w in block.parameters()}) for block in pieces.modules(paths))
    ends = {id(w) for w in weights_of(pieces.modules([*pieces.front, *pieces.back]))}
    if len(held - ends) != counts:
        raise InputError(
            f"model.blocks: blocks share weights with one another, with front ({', '.join(pieces.front)}) or with back "
            f"({', '.join(pieces.back)}); no cut between them is possible"
        )
    for name, weight in model.named_parameters():
        if id(weight) not in held:
            raise InputError(
                f"model: the weight {name} is in none of front ({', '.join(pieces.front)}), {pieces.blocks} and back "
                f"({', '.join(pieces.back)}); put it into a module that is named there"
            )
        if weight.dtype != torch.float32 or not weight.requires_grad:
            kind = str(weight.dtype) if weight.dtype != torch.float32 else "requires_grad False"
            raise InputError(f"model.import: weight {name}: found {kind}; all weights are fp32 and trained")


def weights_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the weights of the modules, each once."""
    weights = {id(weight): weight for module in modules for weight in module.parameters()}
    return list(weights.values())


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a module's weights."""
    return {name: tuple(weight.shape) for name, weight in module.named_parameters()}
