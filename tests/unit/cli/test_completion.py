"""Completion of commands, options, runs, presets and settings in a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from run_folders import submitted_run

from hpctrain.cli.commands.completion import SHELLS, BashSettings
from hpctrain.cli.main import VERBS, cli
from hpctrain.cli.options import completion
from hpctrain.launch.preflight.changed_settings import ALLOWED
from hpctrain.records.model.families import PRESETS

STAMP = "20260101T000000Z-00ff"


def offered(*words: str) -> list[str]:
    """What a shell offers for the last word."""
    found = ShellComplete(cli, {}, "hpctrain", "_HPCTRAIN_COMPLETE").get_completions(list(words[:-1]), words[-1])
    assert all(item.type == "plain" for item in found)
    return [item.value for item in found]


def test_commands_are_offered_with_their_lines() -> None:
    assert offered("") == list(VERBS)
    assert offered("su") == ["submit"]
    assert offered("topology", "ex") == ["export"]
    assert offered("nosuch", "") == list(VERBS)


def test_options_are_offered_and_hidden_ones_are_not() -> None:
    assert {"--partition", "--topology", "--set"} <= set(offered("submit", "run.yaml", "--"))
    assert offered("train", "run.yaml", "--ti") == []
    assert offered("plan", "run.yaml", "--topology", "t.json", "--calib") == ["--calibrate-from"]


def test_options_before_the_cursor_may_be_wrong() -> None:
    """Only the command that is run refuses them."""
    assert offered("submit", "run.yaml", "-t", "t.json", "--dry") == ["--dry-run"]
    assert offered("train", "run.yaml", "-p", "x", "--dry") == ["--dry-run"]


def test_keys_of_the_run_file_are_offered_for_set() -> None:
    assert offered("submit", "run.yaml", "--set", "cluster.no") == ["cluster.nodelist=", "cluster.nodes="]
    assert {"steps=", "cluster.mail.on=", "compression.mode="} <= set(offered("train", "r.yaml", "--set", ""))
    # A run that continues keeps its model.
    assert offered("resubmit", "gpt", "--set", "mo") == []
    assert {key.split(".")[0].rstrip("=") for key in offered("resubmit", "gpt", "--set", "")} == set(ALLOWED)


@pytest.mark.parametrize(
    ("begun", "values"),
    [
        ("cluster.kind=", ["local", "slurm"]),
        ("cluster.kind=s", ["slurm"]),
        ("cluster.internet=", ["true", "false"]),
        ("model.preset=tiny", ["tiny-1m"]),
        ("cluster.time=", []),
        ("nosuch.key=", []),
    ],
)
def test_values_of_a_key_are_offered(begun: str, values: list[str]) -> None:
    key = begun.partition("=")[0]
    assert offered("submit", "run.yaml", "--set", begun) == [f"{key}={value}" for value in values]


def test_presets_are_offered() -> None:
    assert offered("init", "--preset", "") == list(PRESETS)
    assert offered("init", "--preset", "tiny") == ["tiny-1m"]


def test_runs_are_offered_the_newest_first_and_only_those_of_this_user(runs, monkeypatch) -> None:
    submitted_run(runs, "1", name=f"gpt-{STAMP}")
    submitted_run(runs, "2", name=f"bert-{STAMP.replace('2026', '2027')}")
    submitted_run(runs, "3", name=f"open-{STAMP}").chmod(0o777)
    submitted_run(runs, "4", name=f"a;b-{STAMP}")
    (runs / f"none-{STAMP}").mkdir()
    new, old = (f"bert-{STAMP.replace('2026', '2027')}", f"gpt-{STAMP}")
    assert offered("watch", "") == ["bert", "gpt", new, old]
    assert offered("resubmit", "g") == ["gpt", old]
    assert offered("plan", "run.yaml", "--calibrate-from", "gpt-") == [old]
    monkeypatch.setattr(completion, "MOST_RUNS", 1)
    assert offered("watch", "") == ["bert", new]


def test_a_path_of_a_run_folder_is_left_to_the_shell(runs) -> None:
    found = ShellComplete(cli, {}, "hpctrain", "_HPCTRAIN_COMPLETE").get_completions(["watch"], "runs/g")
    assert [(item.value, item.type) for item in found] == [("runs/g", "dir")]


@pytest.mark.parametrize("shell", list(SHELLS))
def test_the_script_is_printed(hpctrain, shell: str) -> None:
    script = hpctrain("completion", shell).stdout
    assert f"_HPCTRAIN_COMPLETE={shell}_complete" in script
    # A space after the '=' of a setting would end the word.
    assert shell == "fish" or "*= ]]" in script


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["submit", "r", "--set", "cluster.kind", "=", "s"], ["slurm"]),
        (["submit", "r", "--set", "cluster.kind", "="], ["local", "slurm"]),
        (["submit", "r", "--set", "cluster.kind=s"], ["cluster.kind=slurm"]),
        (["submit", "r", "--set", "=", "cluster.kind", "=", "s"], ["slurm"]),
        (["submit", "r", "--set", "=", "cluster.ki"], ["cluster.kind="]),
        (["submit", "r", "--set", "a", "=", "b", "--set", "cluster.ki"], ["cluster.kind="]),
        (["submit", "r", "--topology", "=", "t.json", "--dry"], ["--dry-run"]),
    ],
)
def test_bash_splits_words_at_equals_and_gets_the_part_after_it(monkeypatch, words, values) -> None:
    monkeypatch.setenv("COMP_WORDS", " ".join(["hpctrain", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    answer = BashSettings(cli, {}, "hpctrain", "_HPCTRAIN_COMPLETE").complete()
    assert answer.splitlines() == [f"plain,{value}" for value in values]


@pytest.mark.slow
def test_a_real_bash_completes_and_torch_is_not_imported(tmp_path: Path) -> None:
    program = tmp_path / "hpctrain"
    program.write_text(
        f"#!{sys.executable}\nimport atexit, sys\nfrom hpctrain.cli.main import main\n"
        "atexit.register(lambda: print(*{'torch'} & {*sys.modules}, file=sys.stderr, end=''))\nmain()\n"
    )
    program.chmod(0o755)
    script = """
        eval "$(hpctrain completion bash)"
        COMP_WORDS=(hpctrain submit run.yaml --set cluster.kind = s) COMP_CWORD=6
        _hpctrain_completion hpctrain; echo "${COMPREPLY[@]}"
    """
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, env=env)
    assert (done.stdout, done.stderr) == ("slurm\n", "")
