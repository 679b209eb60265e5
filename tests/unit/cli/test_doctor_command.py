"""`hpctrain doctor` as a person runs it."""

from __future__ import annotations

import importlib
import json

import pytest
from rich.text import Text

from hpctrain.base.errors import CommandError
from hpctrain.base.process import WORKER, CommandResult
from hpctrain.doctor.facts import DoctorFinding

TORCH = {"version": "2.13.0+cpu", "cuda_version": None, "gloo": True, "nccl_version": None, "devices": []}


class Machine:
    """The fake Slurm beside a Python that has a torch for CPUs."""

    def __init__(self, slurm):
        self.slurm = slurm
        self.torch = TORCH

    def run(self, argv, timeout_s=None, env=None):
        if argv == [*WORKER, "torch"]:
            return CommandResult(tuple(argv), 0, json.dumps(self.torch), "")
        return self.slurm.run(argv, timeout_s, env)

    def start(self, argv, env=None, log=None, keep_fds=()):
        raise CommandError(f"{argv[0]}: the doctor starts nothing that stays")


@pytest.fixture
def machine(fake, runs, monkeypatch):
    """A laptop: its path has none of the programs that are looked for."""
    machine = Machine(fake)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(importlib.import_module("hpctrain.cli.commands.doctor"), "SystemRunner", lambda: machine)
    monkeypatch.setattr("shutil.which", lambda name: None)
    return machine


def levels(result):
    return {finding["name"]: finding["level"] for finding in json.loads(result.stdout)}


def test_on_a_laptop(machine, hpctrain, tmp_path):
    result = hpctrain("doctor")
    assert result.exit_code == 0
    titles = [line.strip() for line in result.stdout.splitlines() if line and not line.startswith(" ")]
    assert titles[:-1] == ["Slurm", "containers", "Python", "torch", "network", "files"]
    assert titles[-1].startswith("nothing found that would make a run fail")
    assert list(tmp_path.iterdir()) == []


FINDINGS = [
    DoctorFinding("Slurm", "SlurmdTimeout", "ok", "300 s", "", ""),
    DoctorFinding(
        "Slurm", "partitions", "note", "gpu[1-4], cpu", "a job of gpu[1-4] waits for a node that is drained " * 3, ""
    ),
    DoctorFinding("torch", "torch", "problem", "2.13.0+cpu", "it has no CUDA, and the nodes do", "install one " * 9),
    DoctorFinding("files", "run folders", "note", "/a-path-of-one-word" * 9, "it lies on a node's own disk", ""),
]
"""Texts that are short, long, and without a space in 80 columns; those of a machine change between two calls."""


def test_80_columns_hold_every_line_and_a_pipe_gets_whole_ones(machine, hpctrain, monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("hpctrain.cli.commands.doctor"), "findings_of", lambda facts: list(FINDINGS)
    )
    piped = hpctrain("doctor").stdout.splitlines()
    findings = json.loads(hpctrain("doctor", "--json").stdout)
    for finding in findings:
        head = piped.index(f"  {finding['level']}".ljust(11) + f"{finding['name']}: {finding['value']}")
        assert not finding["words"] or piped[head + 1].strip() == finding["words"].strip()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    drawn = Text.from_ansi(hpctrain("doctor").stdout).plain.splitlines()
    assert max(len(line) for line in drawn) <= 80
    narrowest = min(len(line) - len(line.lstrip()) for line in drawn if line.startswith("   "))
    assert narrowest == 11, "what goes on stands below the words, with the width of the terminal to itself"
    assert "".join("".join(drawn).split()) == "".join("".join(piped).split())


def test_json_is_the_list_of_findings(machine, hpctrain):
    result = hpctrain("doctor", "--json")
    findings = json.loads(result.stdout)
    assert all(set(each) == {"subject", "name", "level", "value", "words", "todo"} for each in findings)
    assert levels(result)["commands"] == "note"


def test_a_cluster_with_gpus_and_a_torch_without_cuda(machine, hpctrain, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/scontrol" if name == "scontrol" else None)
    result = hpctrain("doctor", "--json")
    assert result.exit_code == 3
    found = levels(result)
    assert [name for name, level in found.items() if level == "problem"] == ["torch"]
    assert {"version", "SlurmdTimeout", "cred_expire", "low (default)", "high"} <= set(found)
    told = hpctrain("doctor")
    assert told.exit_code == 3
    assert "1 of" in told.stdout
    assert "would make a run fail: torch" in told.stdout


def test_a_torch_that_lacks_gloo(machine, hpctrain):
    machine.torch = {**TORCH, "gloo": False}
    result = hpctrain("doctor", "--json")
    assert result.exit_code == 3
    assert levels(result)["gloo"] == "problem"
