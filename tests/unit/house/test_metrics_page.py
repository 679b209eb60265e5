"""The page of the metrics files has each field that is written, and no other, with its type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import isclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest

from hpctrain.records.format.document import Document, Part
from hpctrain.records.history.node_log import NODE_LOG, NodeRow
from hpctrain.records.history.rank_log import RANK_LOG, RankRow
from hpctrain.records.history.run_log import MetricRow

NAMES = {int: "integer", float: "number", str: "text", bool: "boolean"}
UNITS = {"_s": "s", "_bytes": "bytes", "_hz": "Hz", "_j": "J", "_w": "W", "_c": "°C", "_bytes_max": "bytes"}


def type_of(annotation: Any) -> tuple[str, type[Part] | None]:
    """The type in words, and the model of the objects in it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_of(arguments[0])
    if origin in (Union, UnionType):
        return type_of(next(each for each in arguments if each is not type(None)))
    if origin in (list, dict):
        inner, model = type_of(arguments[-1])
        return f"{'list of' if origin is list else 'map to'} {inner}s", model
    if isclass(annotation) and issubclass(annotation, Part):
        return "object", annotation
    return NAMES.get(annotation, "text"), None


def fields(model: type[Part], prefix: str = "") -> Iterator[tuple[str, str, bool]]:
    """(name, type in words, whether it may be absent) of each field, also within objects."""
    for name, field in model.model_fields.items():
        words, inner = type_of(field.annotation)
        path = prefix + ("schema" if name == "schema_" else name)
        yield path, words, not field.is_required() and field.default is None
        if inner is not None:
            yield from fields(inner, f"{path}.")


@pytest.mark.parametrize(("file", "model"), [("metrics.jsonl", MetricRow), (RANK_LOG, RankRow), (NODE_LOG, NodeRow)])
def test_each_field_of_the_metrics_is_on_the_page(repository, file: str, model: type[Document]) -> None:
    page = (repository / "docs" / "reference" / "metrics.md").read_text()
    section = re.search(rf"(?ms)^## {re.escape(file)}$(.*?)(?=^## |\Z)", page)
    assert section
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in section[1].splitlines()
        if line.startswith("| `")
    ]
    listed = [(row[0].strip("`"), row[1], row[4] != "never") for row in rows]
    where = f"docs/reference/metrics.md, {file}: add a row for a new field, remove one that is gone"
    assert listed == list(fields(model)), where
    for name, _, unit, since, absent, meaning in rows:
        ending = next((unit for end, unit in UNITS.items() if name.strip("`").endswith(end)), None)
        assert ending is None or unit in (ending, f"tokens/{ending}"), name
        assert re.fullmatch(r"\d+\.\d+\.\d+", since), name
        assert absent, name
        assert meaning.endswith("."), name
