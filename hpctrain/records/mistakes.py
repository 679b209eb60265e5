"""From pydantic's errors to lines for the person who wrote the file, with the nearest known key for a typo."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from hpctrain.base.errors import Mistake

Path = tuple[str | int, ...]


def mistakes_of(
    error: ValidationError, model: type[BaseModel], lines: Mapping[Path, int] | None = None
) -> list[Mistake]:
    """Every mistake pydantic found, in file order.

    Args:
        lines: line number of each key path, where the file knows them.
    """
    found = []
    for item in error.errors(include_url=False):
        path = tuple(part for part in item["loc"] if not _is_union_tag(part, item["loc"], model))
        line = _line_of(path, lines or {})
        found.append(Mistake(dotted(path), _text(item, path, model), line))
    return sorted(dict.fromkeys(found), key=lambda mistake: mistake.line or 0)


def dotted(path: Iterable[str | int]) -> str:
    """('data', 'train', 0) -> 'data.train[0]'."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def known_keys(model: type[BaseModel]) -> dict[str, Any]:
    """The keys a model accepts in a file, with their annotations."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def nearest(key: str, known: Iterable[str]) -> str:
    """'; did you mean …?' with the nearest known key, else the list of allowed ones."""
    known = sorted(known)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"allowed: {', '.join(known)}"


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation may hold: of `list[Stage] | None` it is [Stage]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, list, tuple, dict):
        return [model for argument in get_args(annotation) for model in models_in(argument)]
    return []


def _text(item: Any, path: Path, model: type[BaseModel]) -> str:
    if item["type"] == "extra_forbidden":
        owners = _owners(path[:-1], model)
        keys = {key for owner in owners for key in known_keys(owner)}
        return f"unknown key; {nearest(str(path[-1]), keys)}"
    if item["type"] == "missing":
        return "missing; this key must be given"
    message = str(item["msg"]).removeprefix("Value error, ")
    found = item.get("input")
    if isinstance(found, str | int | float | bool) or found is None:
        return f"found {found!r}; {message[0].lower()}{message[1:]}" if message else f"found {found!r}"
    return message


def _owners(path: Path, model: type[BaseModel]) -> list[type[BaseModel]]:
    owners = [model]
    for part in path:
        if isinstance(part, int):
            continue
        owners = [
            inner for owner in owners for key, note in known_keys(owner).items() if key == part
            for inner in models_in(note)
        ]
    return owners


def _is_union_tag(part: str | int, location: Path, model: type[BaseModel]) -> bool:
    """Pydantic puts the tag of a union into the path ('parallel', 'fixed', 'pp'); a person's file has no such key."""
    index = location.index(part)
    if index == 0 or isinstance(part, int):
        return False
    owners = _owners(tuple(p for p in location[:index] if not isinstance(p, int)), model)
    keys = {key for owner in owners for key in known_keys(owner)}
    return bool(owners) and part not in keys and index < len(location) - 1


def _line_of(path: Path, lines: Mapping[Path, int]) -> int | None:
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None
