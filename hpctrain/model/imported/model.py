"""An imported model: calls the user's factory, splits the model into pieces (front, blocks, back), and builds a stage
from them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.errors import InputError
from hpctrain.model.imported.user_error import describe_user_error
from hpctrain.model.layers import StageBlocks
from hpctrain.records.model.imported_spec import ImportedSpec


def call_factory(name: str, known: Mapping[str, int], args: Mapping[str, Any]) -> nn.Module:
    """Call a user's factory and return its model.

    Args:
        name: the factory, as 'package.module:factory'.
        known: keyword arguments that are passed if the factory accepts them.
        args: keyword arguments of the run file, which are always passed.

    Raises:
        InputError: the factory cannot be imported or called, or returns no module.
    """
    factory = _find(name)
    try:
        taken = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a callable written in C has no signature
        taken = ()  # type: ignore[assignment]
    names = {parameter.name for parameter in taken}
    everything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken)
    accepted = {key: value for key, value in known.items() if everything or key in names}
    try:
        model = factory(**{**accepted, **args})
    except Exception as error:
        raise InputError(f"model.import: {name} raised {describe_user_error(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model.import: {name} gave {type(model).__name__}; allowed: a torch.nn.Module")
    return model


def submodule(model: nn.Module, path: str, field: str) -> nn.Module:
    """Return the module of a model at a dotted path.

    Args:
        model: the model.
        path: path as 'decoder.layers'.
        field: key of the run file that names the path, for the message of an error.

    Raises:
        InputError: there is no such module; the message names the modules that the parent has.
    """
    here = model
    done: list[str] = []
    for part in path.split("."):
        children = dict(here.named_children())
        if part not in children:
            where = f"{'.'.join(done)} has" if done else "the model has"
            raise InputError(f"{field}: no module {path!r}; {where} {', '.join(children) or 'none'}")
        here = children[part]
        done.append(part)
    return here


def find_blocks(model: nn.Module) -> str:
    """Return the path of the model's only container of equal blocks: a ModuleList, ModuleDict or Sequential.

    Raises:
        InputError: there is no such container, or more than one.
    """
    containers = list(block_containers(model))
    if len(containers) != 1:
        names = ", ".join(f"{path} ({count})" for path, count in containers) or "none"
        raise InputError(f"model.blocks: give the container of the repeated blocks; found: {names}")
    return containers[0][0]


def around(model: nn.Module, blocks: str) -> tuple[list[str], list[str]]:
    """Return the paths of the modules before the container of the blocks, and of those after it.

    Both are in the order in which the model registered the modules.

    Args:
        model: the model.
        blocks: path of the container.
    """
    front: list[str] = []
    back: list[str] = []
    prefix = ""
    here = model
    for part in blocks.split("."):
        names = [name for name, _ in here.named_children()]
        place = names.index(part)
        front += [prefix + name for name in names[:place]]
        back = [prefix + name for name in names[place + 1 :]] + back
        here = dict(here.named_children())[part]
        prefix += f"{part}."
    return front, back


def _find(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise InputError(
                f"model.import: no module {error.name!r}; searched {_searched()}, not the current folder; name the "
                "folder that holds it with `code`"
            ) from None
        raise InputError(f"model.import: importing {module_name} raised {describe_user_error(error)}") from error
    except Exception as error:
        raise InputError(f"model.import: importing {module_name} raised {describe_user_error(error)}") from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            callables = [key for key, value in vars(target).items() if callable(value) and not key.startswith("_")]
            raise InputError(
                f"model.import: {module_name} has no {attribute!r}; it has {', '.join(callables) or 'no callables'}"
            )
        target = getattr(target, part)
    if not callable(target):
        raise InputError(f"model.import: {name} is of type {type(target).__name__}; allowed: a function or class")
    return target


def _searched() -> str:
    """Return the module search path as text: its first five folders outside the Python installation, then the words
    'the installed packages'."""
    installed = (sys.prefix, sys.base_prefix)
    named = [path for path in sys.path if not path.startswith(installed)]
    return ", ".join([*named[:5], "the installed packages"])


def block_containers(module: nn.Module, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield (path, number of children) of each outermost container of at least two equal blocks with weights."""
    for name, child in module.named_children():
        inner = list(child.children())
        kinds = {type(block) for block in inner}
        weights = any(True for block in inner for _ in block.parameters())
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(inner) > 1 and len(kinds) == 1:
            if weights:
                yield f"{path}{name}", len(inner)
        else:
            yield from block_containers(child, f"{path}{name}.")


class CutPart(nn.Module, ABC):
    """Base class of a stage of a model that hpctrain did not write."""

    @abstractmethod
    def numbered_blocks(self) -> dict[int, nn.Module]:
        """Return block number in the whole model -> block, in order."""


class ImportedPart(CutPart):
    """A stage of an imported model: front modules, some blocks and back modules, applied in turn.

    The first stage has the front, the last stage the back. Parameters have the names of the whole model, so they do not
    depend on the cut.
    """

    def __init__(self, model: nn.Module, front: list[str], blocks: dict[int, str], back: list[str]) -> None:
        super().__init__()
        # These names must not clash with those of the user's modules, which are added beside them.
        self._stage_front = front
        self._stage_blocks = blocks
        self._stage_back = back
        for path in [*front, *blocks.values(), *back]:
            _place(self, path, model.get_submodule(path))

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state [batch, seq, dim], or in the last stage the logits [batch, seq, vocabulary].

        The hidden state is fp32. Logits have autocast's dtype, or fp32 without autocast.

        Args:
            x: tokens [batch, seq] in the first stage, else the hidden state.

        Raises:
            InputError: a module returns something other than one tensor.
        """
        # The modules are looked up by name each time, because a wrapper replaces its block in the module tree.
        for path in [*self._stage_front, *self._stage_blocks.values(), *self._stage_back]:
            x = self.get_submodule(path)(x)
            if not isinstance(x, Tensor):
                raise InputError(f"model: {path} gave a {type(x).__name__}; allowed: one tensor")
        wanted = torch.float32
        if self._stage_back and torch.is_autocast_enabled(x.device.type):
            wanted = torch.get_autocast_dtype(x.device.type)
        return x.to(wanted)

    def numbered_blocks(self) -> dict[int, nn.Module]:
        return {index: self.get_submodule(path) for index, path in self._stage_blocks.items()}


def blocks_of(module: nn.Module) -> dict[int, nn.Module]:
    """Return block number in the whole model -> block, in order, for a stage of any model."""
    if isinstance(module, CutPart):
        return module.numbered_blocks()
    return {int(name): block for name, block in module.layers.named_children()}  # type: ignore[union-attr]


def build_imported(spec: ImportedSpec, blocks: StageBlocks, seed: int) -> nn.Module:
    """Return a stage of the model that the user's factory returns after `torch.manual_seed(seed)`.

    The whole model is built, so that the weights do not depend on the cut; the other parts are freed at once.

    Raises:
        InputError: the factory fails, or returns another model than the one that was measured.
    """
    torch.manual_seed(seed)
    model = call_factory(spec.factory, {"vocabulary": spec.tokens, "seq_len": spec.seq_len}, spec.args)
    names = block_names(model, spec.blocks)
    if len(names) != spec.layers:
        raise InputError(
            f"model.import: {spec.factory} gave {len(names)} blocks, it gave {spec.layers} when it was measured; a "
            "factory must give the same model each time"
        )
    if spec.tied and not (blocks.first and blocks.last):
        raise InputError("model.import: front and back share a weight, which cannot lie in two stages; use one stage")
    for path in [*spec.front, *spec.back]:
        submodule(model, path, "model.import")
    part = ImportedPart(
        model,
        spec.front if blocks.first else [],
        {index: names[index] for index in range(blocks.start, blocks.stop)},
        spec.back if blocks.last else [],
    )
    return part.train()


def block_names(model: nn.Module, container: str) -> list[str]:
    """Return the paths in the model of the blocks in a container, in order.

    Args:
        model: the model.
        container: path of the container.

    Raises:
        InputError: there is no such container.
    """
    children = submodule(model, container, "model.blocks").named_children()
    return [f"{container}.{name}" for name, _ in children]


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Add a module to `root` at a dotted path; parents that are missing become plain modules."""
    *parents, name = path.split(".")
    for part in parents:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(name, module)


@dataclass(frozen=True)
class Pieces:
    """An imported model, and the paths of its pieces: front modules, the container of the blocks, and back modules."""

    model: nn.Module
    front: list[str]
    blocks: str
    back: list[str]

    @property
    def block_paths(self) -> list[str]:
        """Return the paths of the blocks in the model, in order."""
        return block_names(self.model, self.blocks)

    def modules(self, paths: Iterable[str]) -> list[nn.Module]:
        """Return the model's modules at the given paths."""
        return [self.model.get_submodule(path) for path in paths]


def split_into_pieces(model: nn.Module, front: list[str] | None, blocks: str | None, back: list[str] | None) -> Pieces:
    """Return a model's pieces; by default, the only container of equal blocks and the modules before and after it.

    Args:
        model: the model.
        front: paths of the modules before the blocks; None: by default.
        blocks: path of the container of the blocks; None: by default.
        back: paths of the modules after the blocks; None: by default.

    Raises:
        InputError: a named module does not exist; `blocks` is not given and the model has no or several containers of
            equal blocks; the container is empty, of another kind than ModuleList, ModuleDict or Sequential, or holds a
            module twice; or there is no module before or after the blocks.
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
    """Check the weights of an imported model's pieces.

    Every weight must belong to a piece, be fp32 and be trained. All blocks must have weights of the same names and
    shapes. No block may share a weight with another block or another piece.

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
    """Return the weights of the modules, each once although modules may share it."""
    weights = {id(weight): weight for module in modules for weight in module.parameters()}
    return list(weights.values())


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a module's weights."""
    return {name: tuple(weight.shape) for name, weight in module.named_parameters()}
