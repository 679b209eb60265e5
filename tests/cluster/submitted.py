"""A run on the lab as its user handles it: submitted from a folder with a corpus and a run file, and looked at."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import forked_python

from hpctrain.records.history.ledger import read_successors
from hpctrain.records.history.run_log import Event, MetricRow, last_row_of_each_step, read_events, read_metrics
from hpctrain.records.plan.plan import Plan

RUN_STEPS = 150
ENDLESS = 1_000_000
"""More steps than any machine does meanwhile: the run is cancelled, so nothing that happens to it has to be in time."""
REPLICA_ON_EACH_NODE = "parallel={{mode: fixed, dp: {}}}"
"""For a run that measures its nodes itself: on a busy machine the planner may leave some of them without ranks, and
nothing happens when such a node is lost."""
STATUS_EVERY_S = 1.0
"""`hpctrain status` takes half a second of processor time, which the run under test needs."""
RUN = {
    "name": "job",
    "steps": RUN_STEPS,
    "seed": 3,
    "cluster": {"kind": "slurm", "partition": "low", "nodes": 3, "time": "20", "device": "cpu"},
    "model": {"dims": {"layers": 4, "dim": 64, "heads": 4}},
    "data": {"train": ["data"], "seq_len": 64},
    "batch": {"global": 12},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"every": 10, "keep": 2},
    "validation": {"batches": 0},
    "adapt": {"mode": "off"},  # measured times of a busy machine change no plan
}


@dataclass
class Project:
    """A folder with a corpus and a run file, on the lab."""

    cluster: object
    path: Path

    def hpctrain(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = forked_python.run(words, self.path, self.cluster.env)
        assert done.returncode == 0 or not check, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def submit(self, *overrides: str) -> Job:
        """Submitted with the topology of the lab and KEY=VALUE in place of what the run file says."""
        words = ["--topology", "topology.json", *(word for override in overrides for word in ("--set", override))]
        return self.job(json.loads(self.hpctrain("submit", "run.yaml", "--json", *words).stdout))

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

    def rows(self) -> list[MetricRow]:
        return read_metrics(self.folder / "metrics.jsonl")

    def steps(self) -> int:
        rows = self.rows()
        return rows[-1].step if rows else 0

    def attempts(self) -> list[dict[str, object]]:
        path = self.folder / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self) -> list[Event]:
        return read_events(self.folder / "events.jsonl")

    def members(self) -> list[str]:
        """The nodes of the newest generation, with ranks or without."""
        return list(self._newest_start().data["members"])

    def working_nodes(self) -> list[str]:
        """The members with ranks. If a member without any is lost, nothing happens."""
        return Plan.read(self.folder / self._newest_start().data["plan"]).nodes

    def _newest_start(self) -> Event:
        return [event for event in self.events() if event.kind == "generation_started"][-1]

    def wait_for_step(self, step: int) -> None:
        self.project.cluster.wait(lambda: self.steps() >= step, 120, lambda: f"step {step}: {self.explain()}")

    def successors(self) -> list[str]:
        """Jobs that were queued to go on when another one ends."""
        return list(dict.fromkeys(item.job_id for item in read_successors(self.folder)))

    def first_nodes(self) -> list[str]:
        """The nodes of its first attempt, once there is one."""
        self.project.cluster.wait(self.attempts, 60, f"{self.name} has started")
        return [str(node) for node in self.attempts()[0]["nodes"]]

    def wait_for_event(self, kind: str, attempt: int = 0) -> Event:
        """The first event of that kind, or of that kind in that attempt."""

        def events() -> list[Event]:
            return [event for event in self.events() if event.kind == kind and event.attempt >= attempt]

        self.project.cluster.wait(events, 120, lambda: f"{kind}: {self.explain()}")
        return events()[0]

    def wait_until_done(self, timeout_s: float = 240, script_too: bool = True) -> None:
        self.wait_for_end("done", timeout_s)
        if script_too:
            self.wait_for_script()

    def wait_for_script(self) -> None:
        """Until the job script has closed its attempt, which it does after the run's end is known."""
        self.project.cluster.wait(lambda: "end" in self.attempts()[-1], 150, "the job script has ended")

    def wait_for_end(self, state: str, timeout_s: float = 240) -> None:
        """Until `hpctrain status` says that the run is over, as it should be. It is asked when the files allow it."""
        over = ("done", "failed", "cancelled")
        self.project.cluster.wait(
            lambda: self._is_at_an_end() and self.status()["state"] in over, timeout_s,
            lambda: f"the run has ended: {self.explain()}", STATUS_EVERY_S,
        )  # fmt: skip
        assert self.status()["state"] == state, self.explain()

    def _is_at_an_end(self) -> bool:
        """Of the run, or of an attempt that another one may follow."""
        attempts = self.attempts()
        return bool(attempts) and ("end" in attempts[-1] or "finished" in {event.kind for event in self.events()})

    def cancel(self) -> None:
        """For good, with a checkpoint."""
        self.project.hpctrain("cancel", self.name)

    def explain(self) -> str:
        return self.project.hpctrain("logs", self.name, "-n", "5", check=False).stdout[-3000:]

    def assert_whole(self, steps: int = RUN_STEPS) -> None:
        """Every step was done, in one metrics file, whatever happened in between."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        assert [row.step for row in last_row_of_each_step(rows)] == list(range(1, steps + 1))
        generations = [row.generation for row in rows]
        assert generations == sorted(generations)
