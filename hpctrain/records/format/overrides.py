"""Overrides (`--set key.path=value`) and defaults for a file's values; the same typed rules apply to all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.base.errors import FileError, InputError
from hpctrain.records.format.yaml_file import parse_scalar


def apply_overrides(value: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy of `value` with each 'a.b=c' applied; values are read as in YAML.

    Raises:
        InputError: an override has no '=', has an empty key, or leads through a value that is no mapping.
    """
    result = copy.deepcopy(value)
    for text in overrides:
        path, equals, raw = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise InputError(f"--set {text}: write it as key.path=value, for instance --set batch.global=32")
        _set_at_path(result, keys, _value(raw.strip(), text), text)
    return result


def override_paths(overrides: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the key paths that the overrides set."""
    return [tuple(text.partition("=")[0].strip().split(".")) for text in overrides]


def with_defaults(value: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `value` with `defaults` for keys that it leaves out; its own values, null included, stay."""
    result = copy.deepcopy(dict(value))
    for path in missing_paths(value, defaults):
        leaf: Any = defaults
        for key in path:
            leaf = leaf[key]
        inner = result
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = copy.deepcopy(leaf)
    return result


def missing_paths(value: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the key paths of `defaults` that `value` leaves out; a list counts as one value."""
    for key, leaf in defaults.items():
        given = value.get(key, {})
        if isinstance(leaf, Mapping) and isinstance(given, Mapping):
            yield from ((key, *rest) for rest in missing_paths(given, leaf))
        elif key not in value:
            yield (key,)


def _value(raw: str, text: str) -> Any:
    try:
        return parse_scalar(raw)
    except FileError as error:
        raise InputError(f"--set {text}: the value is {error.mistakes[0].text}") from None


def _set_at_path(value: dict[str, Any], keys: list[str], leaf: Any, text: str) -> None:
    for key in keys[:-1]:
        inner = value.get(key)
        if inner is None:
            inner = value[key] = {}
        if not isinstance(inner, dict):
            raise InputError(f"--set {text}: '{key}' holds {inner!r}, which has no keys below it")
        value = inner
    value[keys[-1]] = leaf
