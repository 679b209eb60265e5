"""`hpctrain data prepare` and `hpctrain schema` as a person and a script call them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.records.corpus_index import CorpusIndex

Call = Callable[..., Any]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(9):
        (tmp_path / "text" / f"{number}.md").write_text(f"Document {number}.\n" * 400)
    (tmp_path / "text" / "binary.txt").write_bytes(b"\0\1\2")
    return tmp_path / "text"


def test_a_person_reads_what_was_made_and_what_was_skipped(call: Call, text: Path) -> None:
    done = call("data", "prepare", "text", "-o", "out")
    assert done.code == 0, done.err
    first, second = done.out.splitlines()
    assert first.startswith("out: ")
    assert "for validation, vocabulary 257, from 43.2 kB in 9 files" in first
    assert second == "skipped: 1 files that are not UTF-8 text, 0 that cannot be read"


def test_a_script_gets_the_index_alone(call: Call, text: Path, tmp_path: Path) -> None:
    done = call("data", "prepare", "text", "-o", "out", "--json", "--tokenizer", "train:280", "--valid-fraction", "0")
    assert done.code == 0
    assert json.loads(done.out) == json.loads((tmp_path / "out" / "index.json").read_text())
    assert "nothing was kept aside for validation" in done.err


def test_options_reach_the_corpus(call: Call, text: Path, tmp_path: Path) -> None:
    assert call("data", "prepare", "text", "-o", "out", "--limit-bytes", "10000", "--valid-fraction", "0.3").code == 0
    index = CorpusIndex.read(tmp_path / "out" / "index.json")
    assert 7_000 < index.sources.text_bytes <= 10_000
    assert index.tokens("valid") / (index.tokens("train") + index.tokens("valid")) == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nothing", "-o", "out"), "hpctrain: IN: nothing: no such file or folder"),
        (("text", "-o", "text"), "hpctrain: -o text: the folder is not empty and holds no corpus; name a new folder"),
        (("text", "-o", "out", "--tokenizer", "train:9"), "hpctrain: --tokenizer train:9: found '9' after train:"),
        (("text",), "Missing option '-o'"),
        ((), "Missing argument 'IN...'"),
    ],
)
def test_wrong_use_is_told_and_ends_with_2(call: Call, text: Path, args: tuple[str, ...], message: str) -> None:
    done = call("data", "prepare", *args)
    assert done.code == 2
    assert message in done.err
    assert done.out == ""


def test_replacing_needs_force(call: Call, text: Path) -> None:
    assert call("data", "prepare", "text", "-o", "out").code == 0
    assert call("data", "prepare", "text", "-o", "out").code == 2
    assert call("data", "prepare", "text", "-o", "out", "--force").code == 0


def test_progress_elsewhere_than_on_a_terminal_is_a_few_plain_lines(call: Call, text: Path) -> None:
    done = call("data", "prepare", "text", "-o", "out")
    lines = done.err.splitlines()
    assert lines[-1] == "encoding: 100 %"
    assert len(lines) <= 8
    assert "\x1b" not in done.err


@pytest.mark.parametrize("kind", ["run", "topology", "plan"])
def test_schema_prints_a_json_schema_with_every_meaning(call: Call, kind: str) -> None:
    done = call("schema", kind)
    schema = json.loads(done.out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["type"] == "object"
    assert done.err == ""


def test_the_schema_of_a_run_file_explains_its_keys(call: Call) -> None:
    schema = json.loads(call("schema", "run").out)
    assert schema["properties"]["steps"]["description"] == "Optimizer steps."
    assert schema["$defs"]["Batch"]["properties"]["global"]["minimum"] == 1
    assert schema["$defs"]["Cluster"]["properties"]["nodes"]["type"] == ["string", "integer"]
    assert "import" in schema["$defs"]["Model"]["properties"]


def test_an_unknown_schema_is_told(call: Call) -> None:
    done = call("schema", "image")
    assert done.code == 2
    assert "'image' is not one of 'run', 'site', 'topology', 'plan'" in done.err


@pytest.mark.slow
def test_these_commands_load_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; import hpctrain.cli.data, hpctrain.cli.init, hpctrain.cli.schema; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
