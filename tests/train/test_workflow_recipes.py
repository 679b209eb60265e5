"""The recipes for workflow programs in docs/examples: Snakemake's is run, Nextflow's is parsed; no package of Nextflow
comes with its program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from real_text import TEXT
from train_site import CPU_ONLY

from hpctrain import api

pytestmark = [pytest.mark.slow, pytest.mark.requires("workflows")]

PARSE = """
import sys
from reftrace import Module
result = Module.from_file(sys.argv[1])
sys.exit(result.error) if hasattr(result, "error") else print(*(item.name for item in result.processes))
"""


@pytest.fixture
def recipe(repository: Path, tmp_path: Path) -> Path:
    """The recipe for Snakemake with a small model, a small text and one seed."""
    folder = tmp_path / "my recipe"  # with a blank, as in paths of some sites
    shutil.copytree(repository / "docs/examples/snakemake", folder)
    run = yaml.safe_load((folder / "run.yaml").read_text())
    run["model"] = {"dims": {"layers": 2, "dim": 64, "heads": 4}}
    run["data"]["seq_len"] = 64
    run["cluster"] |= {"nodes": 1, "device": "cpu"}
    run |= {"steps": 10, "checkpoint": {"every": 10}}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"seeds": [3], "texts": "my texts"}))
    (folder / "my texts").symlink_to(TEXT)
    (folder / "test.txt").write_text("A text that the model has not seen, as long as a sequence of the run. " * 3)
    return folder


def test_snakemake_prepares_trains_waits_and_writes_what_the_recipe_says(
    recipe: Path, workflows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "HPCTRAIN_RUNS"):
        monkeypatch.delenv(name, raising=False)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, **CPU_ONLY, "PATH": programs, "XDG_CACHE_HOME": str(recipe / "cache")}

    def snakemake(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(workflows / "snakemake"), "--cores", "2", *words]
        return subprocess.run(argv, cwd=recipe, env=env, capture_output=True, text=True, timeout=800, check=False)

    done = snakemake()
    assert done.returncode == 0, done.stdout + done.stderr
    results = recipe / "results" / "3"
    run = api.load_run(json.loads((results / "job.json").read_text())["folder"])
    assert (run.name, run.run.seed, run.status().state) == ("recipe-3", 3, "done")
    assert json.loads((results / "loss.json").read_text())["step"] == 10
    assert {"config.json", "model.safetensors"} <= {path.name for path in (results / "model").iterdir()}
    assert "recipe-3" in (results / "report.html").read_text()

    # After an interruption the workflow waits for the run that it has, and starts no other.
    for path in (results / "done", results / "loss.json"):
        path.unlink()
    again = snakemake("--dry-run", "--rerun-triggers", "mtime", "--quiet", "host")
    rules = {line.split()[0] for line in again.stdout.partition("Job stats:")[2].splitlines()[3:] if line.strip()}
    assert {"wait", "evaluate"} <= rules, again.stdout + again.stderr
    assert not {"submit", "data"} & rules
    assert len(list((recipe / "runs").iterdir())) == 1


def test_nextflow_s_recipe_is_in_its_language(repository: Path, workflows: Path) -> None:
    recipe = repository / "docs/examples/nextflow/main.nf"
    argv = [str(workflows / "python"), "-c", PARSE, str(recipe)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.split() == ["DATA", "SUBMIT", "WAIT", "EVALUATE", "EXPORT", "REPORT"], done.stderr
