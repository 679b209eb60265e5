"""Turns pydantic's errors about a file into messages for its author, with line numbers. For a misspelled key, the
message names the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hpctrain.base.errors import FieldError

Path = tuple[str | int, ...]

_DISCRIMINATORS = ("mode", "family")
"""Keys whose value says which model of a union a mapping in a file belongs to."""
_SCALARS = (str, int, float, bool, type(None))
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
"""Attribute of a field's metadata that has a bound -> word before the bound."""


def validation_errors(
    error: ValidationError, model: type[BaseModel], lines: Mapping[Path, int] | None = None
) -> list[FieldError]:
    """Return all errors that pydantic reports about a file, in the order of their lines.

    Args:
        model: the model of the whole file.
        lines: key path -> line number; None: line numbers are unknown.
    """
    errors = []
    for item in error.errors(include_url=False):
        path, owners, family = _file_path(item["loc"], model)
        if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
            path = (*path, str(item["ctx"]["discriminator"]).strip("'"))
        text = _text(item, path, owners, family)
        errors.append(FieldError(dotted(path), text, _line_of(path, lines or {})))
    return sorted(dict.fromkeys(errors), key=lambda mistake: mistake.line or 0)


def dotted(path: Iterable[str | int]) -> str:
    """Return a key path as text: ('data', 'train', 0) -> 'data.train[0]'."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def known_keys(model: type[BaseModel]) -> dict[str, Any]:
    """Return key -> type annotation for each key that a model accepts in a file."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def nearest(key: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown key: "did you mean 'KEY'?" with the most similar known key, or the
    list of all known keys if none is similar."""
    known = sorted(known)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"allowed: {', '.join(known)}"


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models in a type annotation: [Stage] for `list[Stage] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, list, tuple, dict):
        return [model for argument in get_args(annotation) for model in models_in(argument)]
    return []


def key_paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (key path, field) for each key that a model accepts in a file, such as 'cluster.mail.on', and for the keys
    of models within it. A key of several models of a union comes once for each model.

    Args:
        prefix: begins each key path.
    """
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field
        for inner in models_in(field.annotation):
            yield from key_paths(inner, f"{key}.")


def _text(item: Any, path: Path, owners: list[type[BaseModel]], family: list[type[BaseModel]]) -> str:
    kind, value, key = item["type"], item.get("input"), str(path[-1]) if path else ""
    if kind == "extra_forbidden":
        discriminator = next((name for name in _DISCRIMINATORS if name in family[0].model_fields), None)
        if discriminator is not None and any(key in known_keys(member) for member in family):
            allowed = ", ".join(known for owner in owners for known in known_keys(owner))
            return f"not a key of this {discriminator}; allowed: {allowed}"
        return f"unknown key; {nearest(key, {known for owner in owners for known in known_keys(owner)})}"
    if kind == "missing":
        fields = [field for owner in owners for name, field in owner.model_fields.items() if key in (name, field.alias)]
        return f"missing; this key must be given{_allowed_in(fields, ' or ')}"
    if kind == "union_tag_not_found":
        unions = [known_keys(owner).get(str(path[-2])) for owner in owners if len(path) > 1]
        members = [member for union in unions for member in models_in(union)]
        tags = [member.model_fields[key] for member in members if key in member.model_fields]
        return f"missing; this key decides which others are allowed{_allowed_in(tags, ', ')}"
    if kind == "union_tag_invalid":
        return f"found {item['ctx']['tag']!r}; allowed: {item['ctx']['expected_tags']}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{_value_text(value)}; keys are expected below it"
    message = str(item["msg"]).removeprefix("Value error, ").replace("valid tuple", "valid list")  # files have lists
    if kind == "value_error" and not isinstance(value, _SCALARS):
        return message
    return f"{_value_text(value)}; {message[:1].lower()}{message[1:]}"


def _allowed_in(fields: Iterable[FieldInfo], separator: str) -> str:
    """Return the end of a message about a missing key: '; allowed: …' with what the key may hold by each of the fields,
    or '' if that takes more than a few words."""
    allowed = dict.fromkeys(text for field in fields if (text := _allowed(field.annotation, field.metadata)))
    return f"; allowed: {separator.join(allowed)}" if allowed else ""


def _allowed(annotation: Any, bounds: Iterable[Any]) -> str:
    """Return what a key may hold, in words: 'a whole number from 1', or the values of a Literal. '' if the annotation
    does not say it in few words.

    Args:
        annotation: the type annotation of the key.
        bounds: the metadata of its field, some of which may be bounds of a number.
    """
    if get_origin(annotation) is Literal:
        return ", ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) in (list, tuple):
        return "a list"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        required = [field.alias or name for name, field in annotation.model_fields.items() if field.is_required()]
        return f"keys below it{': ' if required else ''}{', '.join(required)}"
    words = [_KINDS[annotation]] if isinstance(annotation, type) and annotation in _KINDS else []
    for bound in bounds if words else ():
        words += [f"{word} {getattr(bound, name)}" for name, word in _BOUNDS.items() if hasattr(bound, name)]
    return " ".join(words)


def _value_text(value: Any) -> str:
    """Return 'found …' with the value as Python writes it, in at most 60 characters."""
    if value is None:
        return "found nothing"
    text = repr(value)
    return f"found {text if len(text) <= 60 else text[:57] + '...'}"


def _file_path(location: Path, model: type[BaseModel]) -> tuple[Path, list[type[BaseModel]], list[type[BaseModel]]]:
    """Return (key path in the file, models that may have its last key, models of the union that they belong to) for the
    location in an error of pydantic.

    In a union, the location also contains the value of the discriminator, as 'fixed' in ('parallel', 'fixed', 'pp');
    the key path does not, because the file has no such key. Keys of mappings with free names, such as 'a100' in
    ('device_types', 'a100', 'kind'), are in location and key path.

    Args:
        model: the model of the whole file.
    """
    path: list[str | int] = []
    here, owners, family = [model], [model], [model]
    for part in location:
        if str(part).startswith("("):
            continue  # pydantic's name for a branch of a union that `_shape` chose
        members = [owner for owner in here if _has_tag(owner, part)]
        if len(here) > 1 and members:
            here, family = members, here
            continue
        path.append(part)
        owners = here
        family = family if set(owners) <= set(family) else owners
        if any(part in known_keys(owner) for owner in owners):
            notes = [known_keys(owner)[str(part)] for owner in owners if part in known_keys(owner)]
            here = [inner for note in notes for inner in models_in(note)]
    return tuple(path), owners, family


def _has_tag(owner: type[BaseModel], part: str | int) -> bool:
    """Return whether `part`, an item of the location of a pydantic error, is a value of the discriminator (`mode` or
    `family`) that selects the model `owner` in a union."""
    tags = [owner.model_fields[name].annotation for name in _DISCRIMINATORS if name in owner.model_fields]
    return any(get_origin(tag) is Literal and part in get_args(tag) for tag in tags)


def _line_of(path: Path, lines: Mapping[Path, int]) -> int | None:
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None
