"""`hpctrain data prepare` and `hpctrain schema` as a person and a script call them."""

from __future__ import annotations

import filecmp
import gzip
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import yaml

from hpctrain.cli.commands.run_file import KINDS
from hpctrain.corpus.read.tokens import read_indexes
from hpctrain.records.corpus import CorpusIndex

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
    first, *skipped, last = done.out.splitlines()
    assert first.startswith("out: ")
    assert "for validation, vocabulary 257, from 43.2 kB in 9 files" in first
    assert skipped == [
        "skipped: 1 files that are not UTF-8 text",
        "  text/binary.txt: binary, or not UTF-8; nothing of it is used",
        "  out/skipped.jsonl lists all, with file, line and reason",
    ]
    assert re.fullmatch(r"peak memory: [\d.]+ [MG]B in this process(, at most [\d.]+ [MG]B in each worker)?", last)


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
        (("-o", "out"), "Missing argument 'IN...' (or --recipe FILE)"),
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


def jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_options_of_records_and_cleaning_reach_the_corpus(call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "ﬁne  text\\n"}\nbad\n{"body": "more"}\n')
    args = ("a.jsonl", "-o", "out", "--text-field", "body", "--normalize", "nfkc", "--whitespace", "collapse")
    done = call("data", "prepare", *args)
    assert done.code == 2
    assert "a.jsonl:2: not valid JSON" in done.err
    assert not (tmp_path / "out.partial").exists()  # or the advice would be refused as another command
    done = call("data", "prepare", *args, "--skip-bad", "--valid-fraction", "0")
    assert done.code == 0, done.err
    assert "skipped: 1 records that hold no text or are damaged" in done.out
    tokens = np.fromfile(tmp_path / "out" / "train-00000.bin", dtype="<u2")
    assert tokens.tolist() == [*b"fine text", 256, *b"more", 256]
    sources = CorpusIndex.read(tmp_path / "out" / "index.json").sources
    assert (sources.documents, sources.skipped_bad, sources.clean.normalize) == (2, 1, "nfkc")


def test_what_is_left_out_is_named_and_listed_with_file_line_and_reason(call: Call, tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "train.jsonl", [f"document {n}" for n in range(99)])
    jsonl(tmp_path / "in" / "test.jsonl", ["of another split"])
    (tmp_path / "in" / "README.md").write_text("About the data.")
    (tmp_path / "in" / "note\x1b[31m.txt").write_text("A note.")
    with (tmp_path / "in" / "train.jsonl").open("a") as file:
        file.write("no json\n" * 5)
    done = call("data", "prepare", "in", "-o", "out", "--skip-bad")
    assert done.code == 0, done.err
    assert "left out: 2 text files beside records; name them one by one to take them too" in done.out
    assert "  in/README.md: text file beside records" in done.out
    assert "left out: 1 files that are validation or test by their names" in done.out
    assert "skipped: 5 records" in done.out
    assert "\x1b" not in done.out
    head, *entries = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert head == {"skipped": 8, "listed": 8}
    beside = "text file beside records"
    assert entries[:3] == [
        {"file": "in/README.md", "reason": beside},
        {"file": "in/note\x1b[31m.txt", "reason": beside},
        {"file": "in/test.jsonl", "reason": "validation or test by its name"},
    ]
    bad = {"file": "in/train.jsonl", "reason": "not valid JSON: Expecting value"}
    assert entries[3:] == [{**bad, "line": 100 + n} for n in range(5)]
    (corpus,) = json.loads(call("data", "check", "out", "--json").out)["corpora"]
    index = CorpusIndex.read(tmp_path / "out" / "index.json")
    assert (corpus["shards"], corpus["tokens"]) == (len(index.shards), index.tokens("train") + index.tokens("valid"))
    assert call("data", "prepare", "in", "in/README.md", "-o", "both", "--skip-bad").code == 0
    sources = CorpusIndex.read(tmp_path / "both" / "index.json").sources
    assert (sources.files, sources.beside_records, sources.other_splits) == (2, 1, 1)


def test_a_damaged_archive_tells_what_comes_before_the_damage(call: Call, tmp_path: Path) -> None:
    """Bad records before it do not crowd it out of the list, which is bounded."""
    lines = "no json\n" * 1500 + "".join(json.dumps({"text": f"document {n * n}"}) + "\n" for n in range(3000))
    packed = gzip.compress(lines.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    done = call("data", "prepare", "a.jsonl.gz", "-o", "out", "--skip-bad")
    assert done.code == 0, done.err
    sources = CorpusIndex.read(tmp_path / "out" / "index.json").sources
    assert (sources.skipped_bad, sources.damaged_files) == (1501, 1)
    assert "damaged: 1 files, of which what follows the damage is lost" in done.out
    said = f"; {1500 + sources.documents:,} lines with "
    line = next(line for line in done.out.splitlines() if "a.jsonl.gz:" in line)
    assert f"a.jsonl.gz:{1501 + sources.documents}: damaged archive: " in line
    assert said in line
    assert line.endswith(" come before it, what follows is lost")
    assert "lists the first 1,000 of 1,501" in done.out
    assert len((tmp_path / "out" / "skipped.jsonl").read_text().splitlines()) == 1001


def test_of_a_damaged_text_nothing_is_used_and_that_is_told(call: Call, text: Path, tmp_path: Path) -> None:
    packed = gzip.compress("".join(f"Line {n * n}.\n" for n in range(20_000)).encode())
    (text / "b.txt.gz").write_bytes(packed[: len(packed) // 2])
    done = call("data", "prepare", "text", "-o", "out")
    assert re.search(r"text/b\.txt\.gz: damaged archive: .*; \d+ kB of text come before it, nothing of it", done.out)
    sources = CorpusIndex.read(tmp_path / "out" / "index.json").sources
    assert (sources.files, sources.skipped_unreadable, sources.damaged_files) == (9, 1, 1)


def test_check_tells_every_file_that_is_not_what_was_written(call: Call, text: Path, tmp_path: Path) -> None:
    assert call("data", "prepare", "text", "-o", "out", "--tokenizer", "train:280").code == 0
    done = call("data", "check", "out")
    assert (done.code, done.out.startswith("out: 2 shards with ")) == (0, True)
    shard = tmp_path / "out" / "train-00000.bin"
    data = shard.read_bytes()
    shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    (tmp_path / "out" / "valid-00000.bin").unlink()
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    done = call("data", "check", "out")
    assert done.code == 2
    for mistake in (
        "shards[0]: train-00000.bin is not what was written (its hash differs); prepare the folder again",
        "shards[1]: valid-00000.bin cannot be read: No such file or directory",
        "tokenizer: tokenizer.json is not what was written",
    ):
        assert mistake in done.err
    assert "no such folder" in call("data", "check", "nothing").err
    assert "found no index.json in it" in call("data", "check", "text").err


RECIPE = Path(__file__).parents[3] / "docs" / "examples" / "data_recipe" / "recipe.yaml"


def test_the_example_of_a_recipe_makes_corpora_with_one_tokenizer(call: Call, tmp_path: Path) -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["tokenizer"] = "train:300"
    recipe["clean"].pop("sentences")  # spaCy takes seconds to load; tests of cleaning have it
    recipe["valid_fraction"] = recipe["sources"][1]["valid_fraction"] = 0.1
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for number in range(2):
        texts = [f"A page  that was crawled, {number} {n}." for n in range(60)]
        jsonl(tmp_path / "r" / f"c4/en/c4-train.0000{number}-of-01024.json.gz", texts)
    jsonl(tmp_path / "r/c4/en/c4-validation.00000-of-00008.json.gz", ["kept out"])
    articles = [f"Article number {n} is about a town.\n\nIt is old." for n in range(40)]
    table = pa.table({"id": [str(n) for n in range(40)], "title": ["t"] * 40, "text": articles})
    (tmp_path / "r/wikipedia/20231101.en").mkdir(parents=True)
    pq.write_table(table, tmp_path / "r/wikipedia/20231101.en/train-00000-of-00041.parquet", row_group_size=7)

    done = call("data", "prepare", "--recipe", "r/recipe.yaml", "-o", "data", "--json")
    assert done.code == 0, done.err
    indexes = json.loads(done.out)
    assert {name: index["sources"]["documents"] for name, index in indexes.items()} == {"c4": 120, "wikipedia": 40}
    assert indexes["c4"]["tokenizer"] == indexes["wikipedia"]["tokenizer"]
    assert "    - {path: data/c4, weight: 0.9}\n    - {path: data/wikipedia, weight: 0.1}" in done.err
    folders = [tmp_path / "data" / name for name in ("c4", "wikipedia")]
    assert all(index.vocab_size <= 300 for index in read_indexes(folders))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "data" / "wikipedia" / "tokenizer.json"))
    found = np.fromfile(tmp_path / "data" / "wikipedia" / "train-00000.bin", dtype="<u2")
    assert "is about a town.\nIt is old." in tokenizer.decode(found.tolist())
    checked = call("data", "check", "data")
    assert [line.partition(":")[0] for line in checked.out.splitlines()] == ["data/c4", "data/wikipedia"]
    assert call("data", "prepare", "--recipe", "r/recipe.yaml", "-o", "data").code == 2
    assert call("data", "prepare", "--recipe", "r/recipe.yaml", "-o", "data", "--force").code == 0


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ("sources: []", (), "r.yaml:1: sources: "),
        ("sources:\n  - {name: a, path: x}\n  - {name: a, path: y}", (), "found the name 'a' twice"),
        ("sources: [{name: ../a, path: x}]", (), "r.yaml:1: sources[0].name: "),
        ("sources: [{name: a, path: x, wieght: 2}]", (), "wieght"),
        ("sources: [{name: a, path: nothing.txt}]", (), "nothing.txt: no such file or folder"),
        ("sources: [{name: a, path: '*.none'}]", (), "*.none: found no such file below"),
        ("sources: [{name: a, path: text}]", ("text",), "found IN text beside --recipe; name it as a source"),
        ("sources: [{name: a, path: text}]", ("--skip-bad",), "found --skip-bad beside --recipe; write it into the"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_told(
    call: Call, tmp_path: Path, text: str, args: tuple[str, ...], message: str
) -> None:
    (tmp_path / "r.yaml").write_text(text)
    done = call("data", "prepare", "--recipe", "r.yaml", "-o", "out", *args)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_workers_change_nothing_and_a_kill_costs_no_finished_unit(tmp_path: Path) -> None:
    lines = [f"line {n} of a text that takes a while: {n * n}" for n in range(1000)]
    source = jsonl(tmp_path / "a.jsonl", ["\n".join(lines[n % 900 :]) for n in range(1600)])
    assert source.stat().st_size > 30_000_000  # three units or more

    def command(out: str, workers: int) -> list[str]:
        args = [str(source), "-o", str(tmp_path / out), "--workers", str(workers), "--valid-fraction", "0.05"]
        return [sys.executable, "-m", "hpctrain", "data", "prepare", *args]

    assert subprocess.run(command("one", 1), capture_output=True, check=False).returncode == 0
    partial = tmp_path / "two.partial" / "source-0"
    first = subprocess.Popen(command("two", 2), stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while first.poll() is None and not list(partial.glob("unit-0000?/unit.json")):
            time.sleep(0.01)
        workers = psutil.Process(first.pid).children(recursive=True)
    finally:
        first.kill()
        first.wait()
    # Workers see that their parent is gone, and end too.
    assert psutil.wait_procs(workers, timeout=300)[1] == []
    assert not (tmp_path / "two").exists()
    kept = {path: path.stat().st_ino for path in partial.glob("unit-0000?/train-*.bin") if path.parent.suffix == ""}
    assert kept
    assert subprocess.run(command("two", 2), capture_output=True, check=False).returncode == 0
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", names, shallow=False) == (names, [], [])
    assert set(kept.values()) <= {path.stat().st_ino for path in (tmp_path / "two").iterdir()}


@pytest.mark.parametrize("kind", KINDS)
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
    assert "'image' is not one of 'run', 'site', 'recipe', 'lab', 'topology', 'plan'" in done.err


@pytest.mark.slow
def test_these_commands_load_no_torch(tmp_path: Path) -> None:
    commands = ", ".join(f"hpctrain.cli.commands.{name}" for name in ("data", "run_file"))
    code = f"import sys; import {commands}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
