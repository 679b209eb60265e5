"""The script of a job array: byte for byte what stands in tests/golden, and what must not be in it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpctrain import __version__
from hpctrain.base.errors import RefusedError
from hpctrain.launch.slurm_job.array_script import render_array
from hpctrain.records.run.run import Run

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "array.sh"


def job(name: str, **more: object) -> Run:
    cluster = {"kind": "slurm", "nodes": "3-4", "partition": "gpu", "time": "1:30:00", "device": "cuda",
               "devices_per_node": 4, "after": ["7", "8_1"], "sbatch": ["--comment=half"]}  # fmt: skip
    base = {"steps": 10, "model": {"preset": "tiny-1m"}, "data": {"train": ["/data"]}, "batch": {"global": 8}}
    return Run.from_json({"name": name, **base, "cluster": cluster, **more})


def text(*jobs: Run, limit: int | None = None) -> str:
    folders = [Path("/shared/it's/runs") / item.name for item in jobs]
    return render_array("gpt", jobs, folders, Path("/shared/it's/runs/100% gpt"), limit)


def test_the_script_is_the_golden_one() -> None:
    made = text(job("gpt-lr1e-3"), job("gpt-lr3e-4", optimizer={"lr": 3e-4}), limit=1)
    assert made.replace(__version__, "0.0.0") == GOLDEN.read_text()


def test_the_array_has_no_option_of_a_single_run() -> None:
    """A name or a log of one run would be that of every task, and %j would not tell tasks from jobs."""
    options = re.findall(r"^#SBATCH --([a-z-]+)", text(job("a"), job("b")), re.MULTILINE)
    assert len(options) == len(set(options))
    made = text(job("a"), job("b"))
    assert "#SBATCH --array=0-1\n" in made
    assert "--job-name=a" not in made
    assert "%j" not in made


def test_runs_of_other_jobs_are_refused() -> None:
    other = job("b", recovery={"successors": 1})
    with pytest.raises(RefusedError, match=r"b needs another job than a \(--no-requeue, --requeue\)"):
        text(job("a"), other)


def test_each_task_becomes_the_job_script_of_its_run(tmp_path: Path) -> None:
    folders = [tmp_path / "it's a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "job.sh").write_text(f'echo "$$ {folder.name}"\n')
    script = tmp_path / "array.sh"
    script.write_text(render_array("gpt", [job("a"), job("b")], folders, tmp_path, None))
    for task, folder in enumerate(folders):
        started = subprocess.Popen(
            ["bash", str(script)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SLURM_ARRAY_TASK_ID": str(task)},
        )
        # As the same process, which gets the signals for the job.
        assert started.communicate()[0] == f"{started.pid} {folder.name}\n"
