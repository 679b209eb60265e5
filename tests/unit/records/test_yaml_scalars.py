"""What people write in YAML means what they think it means."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import FileError
from hpctrain.records.format.yaml_file import parse_scalar, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30:00", "1:30:00"),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("y", "y"),
        ("true", True),
        ("FALSE", False),
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("3-4", "3-4"),
        ("2026-01-02", "2026-01-02"),
        ("1_000", "1_000"),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("+5", 5),
        ("null", None),
        ("~", None),
        ("", ""),
        ("'12'", "12"),
        ("[a, 1e-4]", ["a", 1e-4]),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_python_writes_is_read_as_that_float(value: float) -> None:
    assert parse_scalar(repr(value)) == value


@given(st.integers())
def test_every_integer_python_writes_is_read_as_that_integer(value: int) -> None:
    assert parse_scalar(str(value)) == value


def test_duplicate_keys_are_all_told_with_both_lines() -> None:
    with pytest.raises(FileError) as caught:
        parse_yaml("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", "x.yaml")
    assert str(caught.value).splitlines() == [
        "x.yaml:4: b.c: given twice, first in line 3",
        "x.yaml:5: a: given twice, first in line 1",
    ]


def test_each_key_knows_its_line() -> None:
    file = parse_yaml("a:\n  b:\n    - x\n    - {c: 1}\n\nd: 2\n")
    expected = {("a",): 1, ("a", "b"): 2, ("a", "b", 0): 3, ("a", "b", 1): 4, ("a", "b", 1, "c"): 4, ("d",): 6}
    assert file.lines == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "t.yaml:1: not valid YAML: expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", "t.yaml:2: not valid YAML:"),
        ("a: {{ name }}\n", "t.yaml:1: a: found a list or mapping as a key"),
        ("a: 1\n---\nb: 2\n", "t.yaml:2: not valid YAML:"),
        ("a: &x [*x]\n", "t.yaml:1: not valid YAML: found the alias *x"),
        ("a: !!python/object:os.system {}\n", "t.yaml:1: not valid YAML: found the tag !!python/object:os.system,"),
        ("a: \x00", "t.yaml: not valid YAML:"),
        ("[" * 5000, "t.yaml:1: not valid YAML: nested too deep"),
    ],
)
def test_what_is_not_yaml_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(FileError) as caught:
        parse_yaml(text, "t.yaml")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file; `hpctrain init` writes a run file"):
        read_yaml(tmp_path / "run.yaml")
    with pytest.raises(FileError, match="is a folder, expected a regular file"):
        read_yaml(tmp_path)
    (tmp_path / "latin").write_bytes(b"name: caf\xe9")
    with pytest.raises(FileError, match="not a text file in UTF-8"):
        read_yaml(tmp_path / "latin")


def test_utf8_is_read_whatever_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getencoding", lambda: "latin-1", raising=False)
    (tmp_path / "f").write_bytes("name: naïve".encode())
    assert read_yaml(tmp_path / "f").value == {"name": "naïve"}
