"""`hpctrain init`: a run file that is valid, whole and explained, and with --yes a corpus that it trains on."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import FileError
from hpctrain.corpus.input.sample_text import SAMPLE_TEXT_BYTES, SampleText, find_sample_text
from hpctrain.corpus.read.tokens import Corpus, open_validation, read_indexes
from hpctrain.launch import starter as starter_module
from hpctrain.launch.starter import Starter, check_starter, render, write_starter
from hpctrain.records.format.yaml_file import parse_yaml
from hpctrain.records.model.families import PRESETS
from hpctrain.records.run.objective import lengths
from hpctrain.records.run.optimizer import Optimizer
from hpctrain.records.run.run import FixedParallel, Run, read_run

Call = Callable[..., Any]


@pytest.mark.slow
def test_yes_asks_nothing_and_writes_a_run_that_has_its_data(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def find_an_eighth(size: int) -> SampleText:
        asked.append(size)
        return find_sample_text(size // 8)

    monkeypatch.setattr("hpctrain.launch.starter.find_sample_text", find_an_eighth)
    done = call("init", "--yes")
    assert asked == [SAMPLE_TEXT_BYTES]
    assert done.code == 0, done.err
    run = read_run(tmp_path / "run.yaml")
    assert (run.model.preset, run.data.seq_len, run.batch.global_, run.steps) == ("tiny-1m", 128, 16, 200)
    assert (run.checkpoint.every, run.cluster.kind) == (50, "local")
    assert run.optimizer == Optimizer(lr=1e-4, betas=(0.9, 0.999), warmup_steps=1000)
    assert run.data.train == [str(tmp_path / "data")]
    assert 257 < read_indexes(run.data.train_folders)[0].vocab_size <= 4096
    corpus = Corpus.open(run.data.train_folders, "train", run.data.seq_len)
    assert corpus.windows > run.steps * run.batch.global_
    assert corpus.rows(run.seed, 0, 16).max() < corpus.vocab_size
    valid = open_validation(run.data.train_folders, run.data.valid_folders, run.data.seq_len)
    assert valid is not None
    assert valid.windows >= run.validation.batches * run.batch.global_
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.bin"))
    assert 625_000 < size < 12_500_000
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "data"}
    assert "text found on this machine" in done.out
    assert done.out.splitlines()[-1] == "next: hpctrain train run.yaml --local 2"


def test_without_a_terminal_and_without_yes_only_the_file_is_written(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    done = call("init", "sub/mine.yaml", "--steps", "7", "--preset", "mini-10m", "--name", "mine")
    assert done.code == 0
    run = read_run(tmp_path / "sub" / "mine.yaml")
    assert (run.steps, run.model.preset, run.name) == (7, "mini-10m", "mine")
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["mine.yaml"]
    assert "next: hpctrain data prepare TEXT... -o sub/data" in done.out


def test_a_file_that_exists_is_kept_unless_forced(call: Call, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("mine")
    done = call("init", "--yes")
    assert done.code == 2
    assert done.err == "hpctrain: run.yaml: the file exists; add --force to replace it, or name another one\n"
    assert (tmp_path / "run.yaml").read_text() == "mine"
    assert not (tmp_path / "data").exists()


def test_a_folder_in_place_of_a_file_is_told(call: Call, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    done = call("init", "here", "--force")
    assert (done.code, done.err) == (
        2,
        "hpctrain: here: found a folder; name the run file in it, for instance here/run.yaml\n",
    )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--preset", "tiny", "run.yaml: model.preset: found 'tiny'; did you mean 'tiny-1m'?"),
        ("--steps", "0", "run.yaml: steps: found 0; input should be greater than or equal to 1"),
        ("--name", "a b", "run.yaml: name: found 'a b'; string should match pattern"),
        ("--steps", "many", "'many' is not a valid integer"),
    ],
)
def test_a_wrong_value_is_told_before_anything_is_written(
    call: Call, tmp_path: Path, option: str, value: str, message: str
) -> None:
    done = call("init", "--yes", option, value)
    assert done.code == 2
    assert message in done.err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def little_text(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which one small file of text is found."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("All that is written on this machine.\n" * 3000)
    monkeypatch.setattr(
        starter_module, "find_sample_text", lambda limit: SampleText((path,), path.stat().st_size, "little text found")
    )


def test_a_corpus_that_lies_there_is_kept_unless_forced(call: Call, tmp_path: Path, little_text: None) -> None:
    assert call("init", "--yes").code == 0
    before = (tmp_path / "data" / "index.json").stat().st_ino
    done = call("init", "--yes", "second.yaml")
    assert (done.code, "kept the corpus that was there" in done.out) == (0, True)
    assert (tmp_path / "data" / "index.json").stat().st_ino == before
    assert call("init", "--yes", "--force").code == 0
    assert (tmp_path / "data" / "index.json").stat().st_ino != before


def test_other_things_in_the_data_folder_are_never_touched(call: Call, tmp_path: Path, little_text: None) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    done = call("init", "--yes", "--force")
    assert done.code == 2
    assert "data: the folder is not empty and holds no corpus" in done.err
    assert (tmp_path / "data" / "thesis.tex").read_text() == "years of work"
    assert not (tmp_path / "run.yaml").exists()


def test_json_is_alone_on_stdout(call: Call, tmp_path: Path, little_text: None) -> None:
    done = call("init", "--yes", "--json")
    assert json.loads(done.out) == {"run_file": "run.yaml", "data": "data", "name": "first", "kind": "local"}
    assert "next: hpctrain train" in done.err


def test_a_machine_without_text_is_told_what_to_do(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter_module, "find_sample_text", lambda limit: SampleText((), 0, "none"))
    done = call("init", "--yes")
    assert done.code == 2
    assert "found no text on this machine to train on; prepare your own with `hpctrain data prepare" in done.err
    assert not list(tmp_path.iterdir())


class Terminal(io.StringIO):
    """A person who types these lines."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_asks_with_defaults(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, little_text: None
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("mine\n\nzero\n30\ny\n"))
    done = call("init")
    assert done.code == 0, done.err
    run = read_run(tmp_path / "run.yaml")
    assert (run.name, run.model.preset, run.steps) == ("mine", "tiny-1m", 30)
    assert (tmp_path / "data" / "index.json").is_file()


def test_on_a_terminal_the_corpus_may_be_declined_and_what_is_given_is_not_asked(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    done = call("init", "--name", "x", "--preset", "tiny-1m", "--steps", "3")
    assert done.code == 0, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_the_keys_in_the_comments_are_real_keys() -> None:
    """Uncommented one by one, each is accepted, so a person may take any of them out of its comment."""
    text = render(Starter())
    lines = text.splitlines()
    tried = 0
    for number, line in enumerate(lines):
        key = re.match(r"^\s*# +([a-z_]+): ", line)
        if not key or key[1] in ("image", "runtime", "binds", "nv", "env", "mode", "dims"):
            continue
        changed = [*lines[:number], line.replace("# ", "", 1), *lines[number + 1 :]]
        value = parse_yaml("\n".join(changed)).value
        if key[1] in FixedParallel.model_fields:
            value["parallel"]["mode"] = "fixed"
        Run.from_json(value, key[1])
        tried += 1
    assert tried == 41


@pytest.mark.parametrize("preset", ["gpt2-30m", "bert-11m", "t5-16m"])
def test_the_objective_in_the_comments_is_the_models_own(preset: str) -> None:
    text = render(Starter(preset=preset))
    plain, taken = (Run.from_json(parse_yaml(each).value) for each in (text, text.replace("# objective", "objective")))
    assert plain.objective is None
    assert taken.objective == plain.effective_objective()
    assert lengths(plain.effective_objective(), plain.data.seq_len).inputs == plain.data.seq_len


def test_the_container_in_the_comments_is_a_real_one() -> None:
    block = re.search(r"(?m)^# container:\n(?:#   .*\n)+", render(Starter()))
    assert block
    plain = re.sub(r"(?m)^# ", "", block[0])
    value = {**parse_yaml(render(Starter())).value, **parse_yaml(plain).value}
    container = Run.from_json(value).container
    assert container is not None
    assert container.model_fields_set == {"image", "runtime", "binds", "nv", "env"}


def test_every_section_of_a_run_file_is_in_it() -> None:
    text = render(Starter())
    for key in Run.model_json_schema(by_alias=True)["properties"]:
        if key != "schema":
            assert re.search(rf"(?m)^(# )?{key}:", text), key


def test_what_it_says_out_of_its_comments_are_the_defaults() -> None:
    """Values that the file only repeats must not differ from those that hold without it."""
    run = Run.from_json(parse_yaml(render(Starter())).value)
    bare = Run.from_json({"steps": 1, "model": {"preset": "tiny-1m"}, "data": {"train": ["x"]}, "batch": {"global": 1}})
    for key in (
        "parallel",
        "compression",
        "optimizer",
        "precision",
        "checkpoint",
        "validation",
        "recovery",
        "container",
    ):
        assert getattr(run, key) == getattr(bare, key), key


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    data=st.text(
        st.characters(codec="utf-8", exclude_characters="/", exclude_categories=["Cc", "Cs", "Zl", "Zp"]),
        min_size=1,
        max_size=20,
    ),
    steps=st.integers(1, 10**6),
    lr=st.floats(1e-8, 10).map(lambda value: float(f"{value:g}")),
    preset=st.sampled_from(sorted(PRESETS)),
)
def test_whatever_the_values_the_file_says_them(name: str, data: str, steps: int, lr: float, preset: str) -> None:
    text = render(Starter(name=name, data=data, steps=steps, lr=lr, preset=preset))
    run = Run.from_json(parse_yaml(text).value)
    assert (run.name, run.data.train, run.steps, run.optimizer.lr) == (name, [data], steps, lr)
    assert run.model.preset == preset


def test_a_starter_of_other_sizes_is_what_a_demonstration_needs(tmp_path: Path, little_text: None) -> None:
    starter = Starter(
        name="demo", steps=20, seq_len=64, batch=8, checkpoint_every=5, tokenizer="bytes", text_bytes=10**6
    )
    started = write_starter(tmp_path / "demo" / "run.yaml", starter, with_data=True)
    assert started.run == read_run(tmp_path / "demo" / "run.yaml")
    assert started.index is not None
    assert started.index.vocab_size == 257
    assert (started.run.steps, started.run.data.seq_len, started.run.checkpoint.every) == (20, 64, 5)
    with pytest.raises(FileError, match=r"batch\.global: found 0"):
        check_starter(tmp_path / "other.yaml", Starter(batch=0), force=False)


def test_a_place_that_cannot_be_written_is_told(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = call("init", "file/sub/run.yaml")
    assert done.code == 1
    assert done.err == "hpctrain: file/sub/run.yaml: cannot write: Not a directory; nothing was changed\n"
