"""Imports and calls the user's factory, and finds modules of its model by name."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hpctrain.base.errors import InputError
from hpctrain.model.imported.user_error import describe_user_error


def call_factory(name: str, known: Mapping[str, int], args: Mapping[str, Any]) -> nn.Module:
    """Call 'package.module:factory' and return its model.

    Args:
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
    """Return the module at a dotted path.

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
    """Return the path of the only container of equal blocks.

    Raises:
        InputError: there is no such container, or more than one.
    """
    containers = list(_containers(model, ""))
    if len(containers) != 1:
        names = ", ".join(f"{path} ({count})" for path, count in containers) or "none"
        raise InputError(f"model.blocks: give the container of the repeated blocks; found: {names}")
    return containers[0][0]


def around(model: nn.Module, blocks: str) -> tuple[list[str], list[str]]:
    """Return the paths of the modules before and after the blocks, in the order in which the model registered them."""
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
    """Return the module search path as text, without the folders of the Python installation."""
    installed = (sys.prefix, sys.base_prefix)
    named = [path for path in sys.path if not path.startswith(installed)]
    return ", ".join([*named[:5], "the installed packages"])


def _containers(module: nn.Module, path: str) -> Iterator[tuple[str, int]]:
    """Yield (path, number of children) of each outermost container of at least two equal blocks with weights."""
    for name, child in module.named_children():
        inner = list(child.children())
        kinds = {type(block) for block in inner}
        weights = any(True for block in inner for _ in block.parameters())
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(inner) > 1 and len(kinds) == 1:
            if weights:
                yield f"{path}{name}", len(inner)
        else:
            yield from _containers(child, f"{path}{name}.")
