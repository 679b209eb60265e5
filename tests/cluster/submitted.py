"""A run on the lab as its user handles it: submitted from a folder with a corpus and a run file, and looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hpctrain.records.event import Event, read_events
from hpctrain.records.metric import effective, read_metrics

RUN_STEPS = 150
"""Long enough for a fault and a command to come in between."""
RUN = {
    "name": "job",
    "steps": RUN_STEPS,
    "seed": 3,
    "cluster": {"kind": "slurm", "partition": "low", "nodes": "3-4", "time": "20", "device": "cpu"},
    "model": {"dims": {"layers": 4, "dim": 64, "heads": 4}},
    "data": {"train": ["data"], "seq_len": 64},
    "batch": {"global": 12},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"every": 10, "keep": 2},
    "validation": {"batches": 0},
}


@dataclass
class Project:
    """A folder with a corpus and a run file, on the lab."""

    cluster: object
    path: Path

    def hpctrain(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain", *words],
            cwd=self.path, env=self.cluster.env, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def submit(self, *words: str) -> Job:
        return self.job(json.loads(self.hpctrain("submit", "run.yaml", "--json", "-t", "topology.json", *words).stdout))

    def job(self, told: dict[str, str]) -> Job:
        """The run that `submit --json` told of."""
        return Job(self, told["name"], Path(told["folder"]), told["job_id"])


@dataclass
class Job:
    """A submitted run."""

    project: Project
    name: str
    folder: Path
    job_id: str

    def status(self) -> dict[str, object]:
        return json.loads(self.project.hpctrain("status", self.name, "--json").stdout)

    def steps(self) -> int:
        rows = read_metrics(self.folder / "metrics.jsonl")
        return rows[-1].step if rows else 0

    def attempts(self) -> list[dict[str, object]]:
        path = self.folder / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self) -> list[Event]:
        return read_events(self.folder / "events.jsonl")

    def members(self) -> list[str]:
        """The nodes that train: the planner may leave one out."""
        starts = [event for event in self.events() if event.kind == "generation_started"]
        return list(starts[-1].data["members"])

    def wait_for_step(self, step: int) -> None:
        self.project.cluster.wait(lambda: self.steps() >= step, 120, lambda: f"step {step}: {self.explain()}")

    def wait_until_done(self, timeout_s: float = 240, script_too: bool = True) -> None:
        self.project.cluster.wait(
            lambda: self.status()["state"] in ("done", "failed", "cancelled"),
            timeout_s, "the run has ended", self.project.cluster.status_every_s,
        )  # fmt: skip
        assert self.status()["state"] == "done", self.explain()
        if script_too:
            self.project.cluster.wait(lambda: "end" in self.attempts()[-1], 150, "the job script has ended")

    def explain(self) -> str:
        return self.project.hpctrain("logs", self.name, "-n", "5", check=False).stdout[-3000:]

    def assert_whole(self, steps: int = RUN_STEPS) -> None:
        """Every step was done, in one metrics file, whatever happened in between."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        assert [row.step for row in effective(rows)] == list(range(1, steps + 1))
        generations = [row.generation for row in rows]
        assert generations == sorted(generations)
