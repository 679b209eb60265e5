"""The reference of the files: the keys of each document, from the models that read and write them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.records.format.document import Document
from tools.docs_site.markdown import code, escaped, table

UNITS = {
    "_bytes_per_s": "bytes/s", "_flops": "FLOP/s", "_bytes": "bytes", "_hours": "hours", "_s": "seconds",
    "_w": "watts", "_j": "joules", "_c": "°C", "_hz": "Hz", "_mhz": "MHz", "_fraction": "share",
}  # fmt: skip
"""End of a key -> unit of its value, the longest ends first."""
_WORDS = {"string": "text", "boolean": "true or false", "object": "mapping", "array": "list"}
_BOUND_MAX = 10**9
"""Largest bound of a number that is printed. Larger ones only keep nonsense out."""
Schema = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A key or a section of a file: its path as text, and the anchor by which links reach it."""

    text: str
    anchor: str

    def key(self, name: str) -> Place:
        """Return the place of a key below this section."""
        path = self.text.partition(" ")[0]
        return Place(f"{path}.{name}" if path else name, f"{self.anchor}.{name}" if self.anchor else name)


class KeyTables:
    """The tables of a document's keys: one for its own keys, and one for each section below them.

    Anchors begin with the document's kind, except for those of the run file: `#recovery.retries`.
    """

    def __init__(self, model: type[Document], level: int) -> None:
        schema = model.model_json_schema(by_alias=True)
        self._definitions: dict[str, Schema] = schema.get("$defs", {})
        self._prefix = "" if model.schema_kind == "run" else model.schema_kind
        self._level = level
        self._shown: dict[str, Place] = {}
        """Name of a definition -> the section that shows it."""
        self._top = schema

    def markdown(self) -> str:
        """Return all tables with their headings."""
        return "\n\n".join(self._tables(Place("", self._prefix), self._top, self._level))

    def _tables(self, section: Place, schema: Schema, level: int) -> Iterator[str]:
        """Yield the table of a section's keys, then those of the sections below it."""
        below: list[tuple[Place, str]] = []
        rows = [self._row(section, key, value, schema, below) for key, value in schema.get("properties", {}).items()]
        yield table(["key", "value", "default", "meaning"], rows)
        for place, name in below:
            definition = self._definitions[name]
            yield f"{'#' * min(level, 4)} {code(place.text)} {{ #{place.anchor} }}"
            if definition.get("description"):
                yield escaped(definition["description"])
            yield from self._tables(place, definition, level + 1)

    def _row(self, section: Place, key: str, value: Schema, owner: Schema, below: list[tuple[Place, str]]) -> list[str]:
        place = section.key(key)
        default = "required" if key in owner.get("required", []) else self._default(value)
        unit = next((f" ({unit})" for end, unit in UNITS.items() if key.endswith(end)), "")
        kind = self._type(value, place, below) + unit
        headed = place.anchor in {other.anchor for other, _ in below}
        name = code(key) if headed else f"{code(key)}{{ #{place.anchor} }}"
        return [name, kind, default, escaped(value.get("description", ""))]

    def _default(self, value: Schema) -> str:
        """Return a default as in YAML; nothing for 'not set', and for a section, whose keys have their own defaults."""
        default = value.get("default")
        if default is None or default in ("", {}) or (isinstance(default, dict) and self._names(value)):
            return ""
        return code(json.dumps(default, ensure_ascii=False).strip('"'))

    def _names(self, value: Schema) -> list[str]:
        """Return the names of the definitions that a value may have."""
        if "$ref" in value:
            return [value["$ref"].rpartition("/")[2]]
        return [name for other in [*value.get("anyOf", []), *value.get("oneOf", [])] for name in self._names(other)]

    def _type(self, value: Schema, place: Place, below: list[tuple[Place, str]]) -> str:
        """Return what a value may be. Definitions that it refers to, and that have no section yet, are added to
        `below` with the place of their section."""
        if "$ref" in value:
            return self._link(value["$ref"].rpartition("/")[2], place, below)
        if "oneOf" in value and "discriminator" in value:
            return self._variants(value, place, below)
        for key in ("anyOf", "oneOf"):
            if key in value:
                kinds = [self._type(other, place, below) for other in value[key] if other.get("type") != "null"]
                return " or ".join(dict.fromkeys(kinds))
        if "const" in value:
            return code(value["const"])
        if "enum" in value:
            return ", ".join(code(item) for item in value["enum"])
        kind = value.get("type")
        if isinstance(kind, list):
            return " or ".join(_WORDS.get(item, str(item)) for item in kind if item != "null")
        if kind == "array":
            return self._array(value, place, below)
        if kind == "object" and isinstance(value.get("additionalProperties"), dict):
            inner = Place(f"{place.text}.NAME", place.anchor)
            return f"name → {self._type(value['additionalProperties'], inner, below)}"
        return _WORDS.get(kind, str(kind)) + _range(value) if kind else "any"

    def _array(self, value: Schema, place: Place, below: list[tuple[Place, str]]) -> str:
        if "prefixItems" in value:
            return "list: " + ", ".join(self._type(item, place, below) for item in value["prefixItems"])
        return f"list of {self._type(value.get('items', {}), Place(f'{place.text}[]', place.anchor), below)}"

    def _variants(self, value: Schema, place: Place, below: list[tuple[Place, str]]) -> str:
        """Return links to the sections of a value with several forms, which a key of the value tells apart."""
        key = value["discriminator"]["propertyName"]
        words: dict[str, list[str]] = {}
        for word, ref in value["discriminator"]["mapping"].items():
            words.setdefault(ref.rpartition("/")[2], []).append(word)
        order = sorted(words, key=[name for other in value["oneOf"] for name in self._names(other)].index)
        links = []
        for name in order:
            form = Place(f"{place.text} {key}: {', '.join(words[name])}", "-".join([place.anchor, *words[name]]))
            self._link(name, form, below)
            links.append(f"[{', '.join(map(code, words[name]))}](#{self._shown[name].anchor})")
        return f"by `{key}`: {', '.join(links)}"

    def _link(self, name: str, place: Place, below: list[tuple[Place, str]]) -> str:
        definition = self._definitions[name]
        if "properties" not in definition:
            return self._type(definition, place, below)
        if name not in self._shown:
            self._shown[name] = place
            below.append((place, name))
        return f"[{code(self._shown[name].text)}](#{self._shown[name].anchor})"


def _range(value: Schema) -> str:
    """Return the bounds of a number as text."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {value[key]:,}" for key, sign in signs.items() if abs(value.get(key, math.inf)) <= _BOUND_MAX]
    return f" {', '.join(bounds)}" if bounds else ""
