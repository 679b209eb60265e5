"""Run folders as `hpctrain submit` leaves them, for tests that need no training."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.records.history.run_log import Event
from hpctrain.records.run.run import Run

RUN: dict[str, object] = {
    "name": "gpt",
    "steps": 10,
    "model": {"preset": "tiny-1m"},
    "data": {"train": ["/data"]},
    "batch": {"global": 8},
    "cluster": {"kind": "slurm", "nodes": "2"},
}


def slurm_run(**cluster: object) -> Run:
    """The run of a run folder, which asks Slurm for two nodes unless `cluster` says otherwise."""
    return Run.from_json({**RUN, "cluster": {"kind": "slurm", "nodes": "2", **cluster}})


def submitted_run(runs: Path, job_id: str | None, *events: Event, name: str = "gpt-20260101T000000Z-00ff") -> Path:
    """A run folder with its job's id and what its agents wrote."""
    folder = runs / name
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "run.yaml").write_text(json.dumps(RUN))
    if job_id is not None:
        (folder / "job_id").write_text(f"{job_id}\n")
    (folder / "events.jsonl").write_text("".join(json.dumps(event.to_json()) + "\n" for event in events))
    return folder


def event(kind: str, generation: int = 0, reason: str = "", **data: object) -> Event:
    """An event of the first attempt."""
    return Event(
        kind=kind,  # type: ignore[arg-type]
        time_s=1_795_000_000.0,
        attempt=0,
        generation=generation,
        node="gpu1",
        reason=reason,
        data=dict(data),
    )
