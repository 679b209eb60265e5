"""slurm/train.sbatch and probe.sbatch: what they ask sbatch for, and what they call on the compute node."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hpctrain.base.package_data import package_data_path
from hpctrain.launch.slurm_job.job_script import directives
from hpctrain.records.run.run import Run

RUN = {
    "name": "gpt",
    "steps": 10,
    "model": {"preset": "tiny-1m"},
    "data": {"train": ["/data"]},
    "batch": {"global": 8},
    "cluster": {"kind": "slurm", "nodes": "2"},
}
FAKE_HPCTRAIN = """#!/bin/bash
printf '%s\\n' "$@" > {folder}/argv
echo "$HPCTRAIN_RUNS" > {folder}/runs
exit ${{CODE:-0}}
"""


def asked(name: str) -> set[str]:
    """The directives that are on."""
    lines = package_data_path("slurm", name).read_text().splitlines()
    return {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}


def called(name: str, folder: Path, **env: str) -> tuple[list[str], int]:
    """What the script calls in a job of two nodes, and its exit code."""
    fake = folder / "bin" / "hpctrain"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(FAKE_HPCTRAIN.format(folder=shlex.quote(str(folder))))
    fake.chmod(0o755)
    job = {"PATH": f"{fake.parent}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", **env}
    # slurmd runs a copy in its spool folder, started in the folder of the submission.
    spooled = folder / "slurm_script"
    shutil.copy(package_data_path("slurm", name), spooled)
    done = subprocess.run(["bash", str(spooled)], cwd=folder, env=job, capture_output=True, text=True, check=False)
    argv = folder / "argv"
    return (argv.read_text().splitlines() if argv.exists() else [done.stderr.strip()]), done.returncode


@pytest.mark.parametrize("name", ["train.sbatch", "probe.sbatch"])
def test_it_is_valid_bash(name):
    done = subprocess.run(
        ["bash", "-n", str(package_data_path("slurm", name))], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_train_asks_for_what_the_recovery_depends_on():
    own = set(directives(Run.from_json(RUN), Path("/run")))
    named = ("--job-name", "--output")
    assert {option for option in own if not option.startswith(named)} <= asked("train.sbatch")
    assert {option.partition("=")[0] for option in own} <= {
        option.partition("=")[0] for option in asked("train.sbatch")
    }


def test_every_directive_stands_before_the_first_command():
    """sbatch reads none of those that come later."""
    for name in ("train.sbatch", "probe.sbatch"):
        lines = package_data_path("slurm", name).read_text().splitlines()
        first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
        assert not any("#SBATCH" in line for line in lines[first:])


def test_a_run_starts_and_comes_back_by_the_same_words(tmp_path):
    words = ["submit", "run.yaml", "--own-job", "--set", "cluster.kind=slurm", "--set", "cluster.nodes=2"]
    assert called("train.sbatch", tmp_path) == (words, 0)
    assert called("train.sbatch", tmp_path, SLURM_RESTART_COUNT="1") == (words, 0)
    assert (tmp_path / "runs").read_text() == f"{tmp_path}/runs\n"


def test_variables_of_the_submission_win(tmp_path):
    argv, code = called("train.sbatch", tmp_path, RUN_FILE="my big.yaml", TOPOLOGY="t.json", CODE="4")
    assert (argv[:2], argv[-2:], code) == (["submit", "my big.yaml"], ["--topology", "t.json"], 4)
    argv, _ = called("train.sbatch", tmp_path, RUN="gpt", HPCTRAIN_RUNS="/scratch/runs")
    assert argv == ["resubmit", "gpt", "--own-job"]
    assert (tmp_path / "runs").read_text() == "/scratch/runs\n"


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("3", 0), ("4", 4), ("1", 1)])
def test_a_probe_with_warnings_is_no_failed_job(tmp_path, code, expected):
    words = ["probe", "--nodes", "2", "--output", "all.json", "--device", "auto"]
    assert called("probe.sbatch", tmp_path, OUTPUT="all.json", CODE=code) == (words, expected)


@pytest.mark.parametrize("name", ["train.sbatch", "probe.sbatch"])
def test_what_is_missing_is_said(tmp_path, name):
    assert "submit it: sbatch" in called(name, tmp_path, SLURM_JOB_ID="")[0][0]
    words, code = called(name, tmp_path, PATH=os.defpath, SLURMD_NODENAME="n7")
    assert "no hpctrain on the path of n7; write into setup()" in words[0]
    assert code == 2
