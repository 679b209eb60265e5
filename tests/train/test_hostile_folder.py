"""A run that is started, and goes on, in folders full of modules that somebody else left there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hostile import lay_traps
from train_site import Site, processes_of, wait_for

from hpctrain.base.module_argv import program

pytestmark = pytest.mark.slow


def test_nothing_is_imported_from_the_current_folder_nor_from_the_run_folder(site: Site, tmp_path: Path) -> None:
    """Probe, plan, agents, fork server and workers; then the same by a process in the background."""
    here, caught = tmp_path / "here", tmp_path / "caught"
    lay_traps(here, caught)
    env = {**os.environ, "HPCTRAIN_RUNS": str(tmp_path / "runs")}

    def hpctrain(*words: str, cwd: Path) -> str:
        argv = [*program("hpctrain"), *words]
        done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    settings = ("--set", f"data.train=[{site.path}/data]", "--set", "steps=4", "--set", "validation={every: 4}")
    said = hpctrain("train", f"{site.path}/run.yaml", "--local", "2", *settings, "--json", cwd=here)
    folder = Path(json.loads(said)["folder"])
    assert (folder / "topology.json").exists()
    assert (folder / "finished").exists()

    lay_traps(folder, caught)
    said = hpctrain("resubmit", ".", "--set", "steps=6", "--json", cwd=folder)
    assert json.loads(said)["folder"] == str(folder)
    attempts = folder / "attempts.jsonl"

    def is_over() -> bool:
        lines = attempts.read_text().splitlines()
        return len(lines) == 2 and "end" in json.loads(lines[-1]) and not processes_of(folder)

    wait_for(is_over, 120, "the end of the run in the background")
    status = json.loads(hpctrain("status", str(folder), "--json", cwd=here))
    assert (status["step"], status["state"]) == (6, "done")
    assert not caught.exists(), caught.read_text()
