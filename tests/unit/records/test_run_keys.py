"""The keys of run.yaml are a promise: a change shows here, and each of them is documented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from hpctrain.cli.commands.run_file import KINDS
from hpctrain.records.format.document import Document
from hpctrain.records.format.validation_errors import key_paths
from hpctrain.records.history.run_log import EVENTS, EventKind
from hpctrain.records.run.run import Run

GOLDEN = Path(__file__).parents[2] / "golden" / "run_keys.txt"


def test_the_keys_of_a_run_file_are_the_recorded_ones() -> None:
    assert sorted({key for key, _ in key_paths(Run)}) == GOLDEN.read_text().split()


def undocumented(schema: Any) -> list[str]:
    definitions = schema.get("$defs", {})
    return [
        f"{owner}.{key}"
        for owner, definition in {"": schema, **definitions}.items()
        for key, field in definition.get("properties", {}).items()
        # A field that says what its model says refers to it.
        if not (
            field.get("description") or definitions.get(field.get("$ref", "").split("/")[-1], {}).get("description")
        )
    ]


@pytest.mark.parametrize("model", KINDS.values())
def test_every_key_has_a_description(model: type[BaseModel]) -> None:
    assert undocumented(model.model_json_schema(by_alias=True)) == []


@pytest.mark.parametrize("model", KINDS.values())
def test_every_file_has_a_schema_for_editors(model: type[BaseModel]) -> None:
    schema = json.loads(json.dumps(model.model_json_schema(by_alias=True)))
    assert schema["additionalProperties"] is False
    assert schema["description"]
    assert "schema" in schema["properties"]


def test_every_file_that_people_read_has_a_schema() -> None:
    """All documents, but for messages between processes, a file that exists only while a corpus is made, and the memory
    of `hpctrain list`."""
    internal = {"check_order", "check_result", "corpus_part", "ended_runs"}
    kinds = {model.schema_kind for model in Document.__subclasses__() if model.__module__.startswith("hpctrain.")}
    assert kinds - internal == set(KINDS)


def test_every_kind_of_event_is_described() -> None:
    assert list(EVENTS) == list(get_args(EventKind))
