"""`--sweep` and `--sweep-file`: which runs they name, and how the runs are called."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import FileError, InputError
from hpctrain.cli.options.sweep import expand_sweep
from hpctrain.launch.sweep_settings import run_names
from hpctrain.records.history.sweep import RUNS_MAX
from hpctrain.records.run.run import RUN_NAME

PLAIN = st.text("abcxyz0123456789.e_", min_size=1, max_size=6)


def test_every_value_is_combined_with_every_other_the_last_option_fastest() -> None:
    runs = expand_sweep(["optimizer.lr=1e-3,3e-4", "seed=0-1,7"], None)
    assert [(run["optimizer.lr"], run["seed"]) for run in runs] == [
        ("1e-3", "0"), ("1e-3", "1"), ("1e-3", "7"), ("3e-4", "0"), ("3e-4", "1"), ("3e-4", "7"),
    ]  # fmt: skip
    assert run_names("gpt", runs)[:2] == ["gpt-lr1e-3-seed0", "gpt-lr1e-3-seed1"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=0-20/5", ["0", "5", "10", "15", "20"]),
        ("optimizer.betas=[0.9,0.95],[0.9,0.99]", ["[0.9,0.95]", "[0.9,0.99]"]),
        ("data.weights={a: 1, b: 2},{a: 2, b: 1}", ["{a: 1, b: 2}", "{a: 2, b: 1}"]),
        ('notes="a,b",c', ['"a,b"', "c"]),
        ("model.preset= tiny-1m , gpt2-124m", ["tiny-1m", "gpt2-124m"]),
        ("optimizer.lr=1e-3", ["1e-3"]),
        ("steps=5-5", ["5"]),
    ],
)
def test_values_and_ranges(text: str, values: list[str]) -> None:
    (key,) = {key for run in expand_sweep([text], None) for key in run}
    assert [run[key] for run in expand_sweep([text], None)] == values


@pytest.mark.parametrize(
    ("sweeps", "words"),
    [
        (["seed"], "write it as KEY=VALUE"),
        (["seed="], "write it as KEY=VALUE"),
        (["=1,2"], "write it as KEY=VALUE"),
        (["seed=1,,2"], "write it as KEY=VALUE"),
        (["seed=3-1"], "ends before it begins"),
        (["seed=0-99999999999999999"], f"allowed: up to {RUNS_MAX}"),
        (["seed=0-99", "optimizer.lr=1e-3,1e-4,1e-5,2e-3,2e-4,2e-5,3e-3,3e-4,3e-5,4e-3,4e-4"], "allowed: up to"),
        (["seed=1,1"], "the run seed=1 twice"),
        (["seed=0-3,2"], "twice"),
        (["seed=1,2", "seed=3,4"], "seed and --sweep seed set the same key"),
        (["optimizer={lr: 1},{lr: 2}", "optimizer.lr=1,2"], "set the same key"),
        (["cluster.nodes=2,4"], "tasks of one job array, which all ask Slurm for the same"),
        (["name=a,b"], "each run is named by what the sweep sets"),
    ],
)
def test_what_is_no_sweep(sweeps: list[str], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        expand_sweep(sweeps, None)


def test_a_swept_key_may_not_be_set_too() -> None:
    with pytest.raises(InputError, match="seed and --set seed set the same key"):
        expand_sweep(["seed=0-4"], None, ["steps=7", "seed=3"])


def test_a_file_has_a_run_a_row_and_its_rows_are_combined_with_other_options(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text('\ufeffoptimizer.lr, batch.global,optimizer.betas\n1e-3,8,"[0.9, 0.95]"\n\n3e-4, 16,\n')
    rows = [
        {"optimizer.lr": "1e-3", "batch.global": "8", "optimizer.betas": "[0.9, 0.95]"},
        {"optimizer.lr": "3e-4", "batch.global": "16"},
    ]
    assert expand_sweep([], file) == rows
    assert expand_sweep(["seed=0-1"], file) == [{**row, "seed": seed} for row in rows for seed in ("0", "1")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "runs.csv:1: found the keys"),
        ("seed,seed\n1,2\n", "runs.csv:1: found the keys"),
        ("seed,\n1,2\n", "runs.csv:1: found the keys"),
        ("seed\n", "found no run"),
        ("seed\n1\n2,3\n", "runs.csv:3: found 2 cells; the header has 1 keys"),
        ('seed\n"1\n', "no CSV"),
        ("seed\n" + "\n".join(map(str, range(RUNS_MAX + 1))), "found more than"),
    ],
)
def test_files_that_are_no_sweep(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(text)
    with pytest.raises(FileError, match=re.escape(words)):
        expand_sweep([], file)


def test_names_are_numbers_where_values_make_none() -> None:
    paths = [{"model.hf": f"org/model{number}"} for number in range(11)]
    assert run_names("gpt", paths)[::10] == ["gpt-00", "gpt-10"]
    assert run_names("gpt", [{"a.x": "1", "b.x": "2"}]) == ["gpt-a.x1-b.x2"]
    assert run_names("g" * 60, [{"optimizer.lr": "1e-3"}, {}]) == ["g" * 60 + "-0", "g" * 60 + "-1"]
    with pytest.raises(InputError, match="give the run file a shorter name"):
        run_names("g" * 64, [{"seed": "1"}])


@given(st.lists(st.lists(PLAIN, min_size=1, max_size=4, unique=True), min_size=1, max_size=4))
def test_a_grid_has_the_product_of_its_values_and_a_name_for_each(axes: list[list[str]]) -> None:
    """Whatever the values are, names are unique and safe as names of folders."""
    options = [f"key{number}={','.join(values)}" for number, values in enumerate(axes)]
    runs = expand_sweep(options, None)
    assert [list(run.values()) for run in runs] == _product(axes)
    names = run_names("gpt", runs)
    assert len(set(names)) == len(runs)
    assert all(re.fullmatch(RUN_NAME, name) and name.startswith("gpt-") for name in names)


def _product(axes: list[list[str]]) -> list[list[str]]:
    combined: list[list[str]] = [[]]
    for values in axes:
        combined = [[*row, value] for row in combined for value in values]
    return combined


@given(st.lists(st.text(max_size=30), max_size=3))
def test_any_text_is_a_sweep_or_an_error_of_ours(texts: list[str]) -> None:
    with contextlib.suppress(InputError):
        runs = expand_sweep(texts, None)
        assert len(runs) <= RUNS_MAX
        assert len(run_names("gpt", runs)) == len(runs)
