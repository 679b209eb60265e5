"""A device's name: its parts, and its text in files."""

from __future__ import annotations

import json
import pickle

import pytest
from pydantic import TypeAdapter, ValidationError

from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.plan import ParallelDims


def test_a_device_is_its_text_and_knows_its_node() -> None:
    made = DeviceId.of("n3", "cuda0")
    assert made == "n3:cuda0"
    assert (made.node, made.device) == ("n3", "cuda0")
    assert {made: 1}["n3:cuda0"] == 1
    assert pickle.loads(pickle.dumps(made)).node == "n3"
    assert (DeviceId("n3").node, DeviceId("n3").device) == ("n3", "")


def test_a_file_holds_the_text() -> None:
    form = TypeAdapter(list[DeviceId])
    (read,) = form.validate_json('["n3:cuda0"]')
    assert read.device == "cuda0"
    assert json.loads(form.dump_json([read])) == ["n3:cuda0"]
    assert form.json_schema()["items"] == {"type": "string"}


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValidationError, match="halves of surrogate pairs"):
        TypeAdapter(DeviceId).validate_python("n3:\ud800")


def test_degrees_as_text() -> None:
    assert str(ParallelDims(2, 1, 4)) == f"{ParallelDims(2, 1, 4)}" == "pp 2 × dp 1 × tp 4"
