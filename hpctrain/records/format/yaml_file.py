"""Reads YAML that people write: YAML 1.2 scalars, no duplicate keys, a line number for every key. Also applies
overrides (`--set key.path=value`) and defaults to the values of a file, before a model checks all of them.

PyYAML follows YAML 1.1, where `1:30:00` is 5400, `on` is true and `1e-4` is text. Nobody who writes a wall time, a
switch or a learning rate means that, so scalars follow YAML 1.2's core schema (https://yaml.org/spec/1.2.2/, section
10.3.2).
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.base.json_text import LEVELS_MAX, parse_integer
from hpctrain.records.format.input_file import read_input_text
from hpctrain.records.format.validation_errors import dotted, validation_errors

Model = TypeVar("Model", bound=BaseModel)

YAML_BYTES = 2**20
"""Most bytes of a YAML file; PyYAML needs a second for a tenth of that."""


class _Loader(yaml.SafeLoader):
    """PyYAML's SafeLoader with the scalars of YAML 1.2's core schema in place of YAML 1.1's, and without aliases and
    tags."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    _level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node of the document as SafeLoader does, with three refusals: aliases (*name), which may
        contain themselves and grow to any size; tags (!!bool), which change the type of a value; and more than
        LEVELS_MAX levels."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _problem(event, f"found the alias *{event.anchor}, which is not supported; write the value out")
        if event.tag is not None:
            shown = event.tag.replace("tag:yaml.org,2002:", "!!")[:40]
            raise _problem(event, f"found the tag {shown}, which is not supported; write the value without it")
        if self._level > LEVELS_MAX:
            raise _problem(event, f"nested too deep; allowed: up to {LEVELS_MAX} levels")
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        return node


def _problem(where: Any, text: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=where.start_mark)


_RESOLVERS = {
    "null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", [*"tTfF"]),
    "int": (r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", [*"-+0123456789"]),
    "float": (
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        [*"-+.0123456789"],
    ),
}
"""Kind of scalar -> (pattern of its text, characters with which the text may begin)."""
for _kind, (_form, _beginnings) in _RESOLVERS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_form), _beginnings)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    try:
        return parse_integer(text, 0 if text[:2] in ("0o", "0x") else 10)
    except ValueError as error:
        raise _problem(node, str(error)) from None


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node))
    value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if math.isinf(value) and "inf" not in text.lower():
        raise _problem(node, f"found the number {text[:40]}, which is too large; allowed: finite numbers")
    return value


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    """Return the text of a scalar with surrogate pairs joined. JSON, which is also YAML, writes a character above
    U+FFFF as two escapes, and PyYAML reads them as two characters."""
    text = str(loader.construct_scalar(node))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:str", _text)


@dataclass(frozen=True)
class YamlFile:
    """A YAML file that was read: its path, its content as plain values, and key path -> line number, counted from
    1."""

    path: str
    value: Any
    lines: dict[tuple[str | int, ...], int]


def read_yaml(path: Path, *, owned: bool = False) -> YamlFile:
    """Return the content of the YAML file at `path`.

    Args:
        owned: require that the file and its folder belong to this user, as in a run folder.

    Raises:
        FileError: the file is missing, unreadable, longer than YAML_BYTES, or no YAML that `parse_yaml` accepts.
        UntrustedError: with `owned`, the file or its folder belongs to somebody else, or others can write to one of
            them.
    """
    text = read_input_text(path, YAML_BYTES, "no such file; `hpctrain init` writes a run file", owned=owned)
    return parse_yaml(text, str(path))


def read_yaml_model(path: Path, model: type[Model], expected: str) -> Model:
    """Return the content of the YAML file at `path` as a `model`.

    Args:
        expected: example of the content, for the error about an empty file.

    Raises:
        FileError: the file is missing, unreadable, without keys, or no YAML that `parse_yaml` accepts, or does not fit
            the model; all errors about the model are listed with their lines.
    """
    file = read_yaml(path)
    if not isinstance(file.value, dict) or not file.value:
        raise FileError(path, [FieldError("", f"found no keys; expected {expected}", 1)])
    try:
        return model.model_validate(file.value)
    except ValidationError as error:
        raise FileError(path, validation_errors(error, model, file.lines)) from None


def parse_yaml(text: str, source: str = "<text>") -> YamlFile:
    """Return the content of a YAML text.

    Args:
        source: name of the text in errors, such as the path of its file.

    Raises:
        FileError: the text is not YAML, has duplicate keys (all are listed), lists or mappings as keys, aliases, tags
            or more than LEVELS_MAX levels, or has more than YAML_BYTES characters.
    """
    if len(text) > YAML_BYTES:
        raise FileError(source, [FieldError("", f"has {len(text)} characters, expected at most {YAML_BYTES}")])
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            lines: dict[tuple[str | int, ...], int] = {}
            mistakes: list[FieldError] = []
            if node is not None:
                _walk(node, (), lines, mistakes)
            if mistakes:
                raise FileError(source, mistakes)
            value = loader.construct_document(node) if node is not None else {}
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise FileError(source, [FieldError("", f"not valid YAML: {error.problem}", line)]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise FileError(source, [FieldError("", f"not valid YAML: {' '.join(str(error).split())}")]) from None
    return YamlFile(source, value, lines)


def parse_scalar(text: str) -> Any:
    """Return the value that a text stands for in YAML: 0.0001 for '1e-4', a list for '[a, b]'. A blank text stays.

    Raises:
        FileError: the text is not YAML (`parse_yaml`).
    """
    return parse_yaml(text).value if text.strip() else text


def _walk(node: yaml.Node, path: tuple[str | int, ...], lines: dict[Any, int], mistakes: list[FieldError]) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            place = (*path, index)
            lines[place] = item.start_mark.line + 1
            _walk(item, place, lines, mistakes)
    elif isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                text = "found a list or mapping as a key (is a value in { } missing its quotes?)"
                mistakes.append(FieldError(dotted(path), text, line))
                continue
            here = (*path, key.value)
            if here in lines:
                mistakes.append(FieldError(dotted(here), f"given twice, first in line {lines[here]}", line))
            lines.setdefault(here, line)
            _walk(item, here, lines, mistakes)


class Override(str):
    """An override, a text 'key.path=value', that comes from another command-line option than `--set`. Errors name this
    option.
    """

    option: str
    """Name of the option, as '-t/--time'."""

    @classmethod
    def of(cls, option: str, key: str, value: str | int) -> Override:
        """Return the override that sets `key`, such as 'cluster.time', to `value`. A text is quoted, so
        that YAML reads it as a text.
        """
        made = cls(f"{key}={json.dumps(value)}")
        made.option = option
        return made


def option_for(key: str, overrides: tuple[str, ...]) -> str:
    """Return the name of the option that set a key. The option is taken from the last override that sets the key
    itself, a mapping or list that contains the key, or a key within it. Return '--set' if this override is no
    `Override`, or if no override sets the key.

    Args:
        key: key path such as 'cluster.mail.on[0]'.
    """
    for text, path in reversed([*zip(overrides, override_paths(overrides), strict=True)]):
        set_key = dotted(path)
        if key == set_key or key.startswith((f"{set_key}.", f"{set_key}[")) or set_key.startswith(f"{key}."):
            return _option_of(text)
    return "--set"


def _option_of(override: str) -> str:
    return override.option if isinstance(override, Override) else "--set"


def apply_overrides(value: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy of `value`, the content of a file, with each override applied: 'a.b=c' sets the key b in the
    mapping a to c, which is read as YAML.

    Raises:
        InputError: an override has no '=', has an empty key or a value that is not YAML, or leads through a value that
            is no mapping.
    """
    result = copy.deepcopy(value)
    for text in overrides:
        path, equals, raw = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise InputError(f"--set {text}: write it as key.path=value, for instance --set batch.global=32")
        try:
            leaf = parse_scalar(raw.strip())
        except FileError as error:
            raise InputError(f"--set {text}: the value is {error.mistakes[0].text}") from None
        _set_at_path(result, keys, leaf, text)
    return result


def override_paths(overrides: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the key path that each override sets: ('a', 'b') for 'a.b=c'."""
    return [tuple(text.partition("=")[0].strip().split(".")) for text in overrides]


def with_defaults(value: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `value`, the content of a file, with the values of `defaults` for keys that `value` leaves out.
    A key that `value` has stays as it is, also with the value null.
    """
    result = copy.deepcopy(dict(value))
    for path, leaf in missing_values(value, defaults):
        _set_at_path(result, path, copy.deepcopy(leaf), "")
    return result


def missing_values(value: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (key path, value) for each value of `defaults` whose key path is not in `value`, the content of a file. A
    list counts as one value."""
    for key, leaf in defaults.items():
        given = value.get(key, {})
        if isinstance(leaf, Mapping) and isinstance(given, Mapping):
            yield from (((key, *rest), inner) for rest, inner in missing_values(given, leaf))
        elif key not in value:
            yield (key,), leaf


def _set_at_path(value: dict[str, Any], keys: Sequence[str], leaf: Any, text: str) -> None:
    for key in keys[:-1]:
        inner = value.get(key)
        if inner is None:
            inner = value[key] = {}
        if not isinstance(inner, dict):
            raise InputError(f"{_option_of(text)} {text}: '{key}' holds {inner!r}, which has no keys below it")
        value = inner
    value[keys[-1]] = leaf
