"""A worker's own error in a real run: where it is told, whom it blames, and what the next attempt measures anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_own_model import EXAMPLE, SETTINGS
from train_site import Site, small_topology

from hpctrain.records.history.run_log import Event

pytestmark = pytest.mark.slow

TRIP = """

import os
from pathlib import Path

_TRIP = Path(os.environ.get("TRIP", "/nonexistent"))


def trip() -> None:
    if os.environ.get("RANK") == "1" and _TRIP.exists():
        kind, _, message = _TRIP.read_text().partition(" ")
        raise {"RuntimeError": RuntimeError, "KeyError": KeyError}[kind](message)
"""
ECC = (
    "CUDA error: uncorrectable ECC error encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\n"
)


class Tripping:
    """A run on two nodes whose model raises on rank 1 for as long as a file says so."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.name, self.file = site, name, site.path / f"{name}.trip"
        place = site.path / name
        shutil.copytree(EXAMPLE, place)
        code = place / "code" / "gpt.py"
        text = code.read_text()
        # In a block, so that it happens on whichever rank holds blocks.
        own = "    def forward(self, x: Tensor) -> Tensor:\n        x = x + self.dropout(self.attention"
        assert text.count(own) == 1
        code.write_text(text.replace(own, own.replace("        x = x +", "        trip()\n        x = x +")) + TRIP)
        self.line = 1 + next(
            i for i, line in enumerate(code.read_text().splitlines()) if line.strip().startswith("raise {")
        )
        small_topology(2).write(site.path / f"{name}.json")
        self.folder = Path()

    def train(self) -> str:
        done = self.site.train(
            f"{self.name}/run.yaml", "--local", "2", "--topology", f"{self.name}.json",
            "--set", f"name={self.name}", *SETTINGS, env={"TRIP": str(self.file)},
        )  # fmt: skip
        assert done.folder is not None, done.said
        self.folder = done.folder
        return done.said

    def resume(self) -> str:
        return self.site.train("--resume", self.folder.name, env={"TRIP": str(self.file)}).said

    def attempts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "attempts.jsonl").read_text().splitlines()]

    def events(self, attempt: int) -> list[Event]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := Event.from_json(json.loads(line))).attempt == attempt]


def test_an_error_of_the_hardware_blames_its_node_and_has_it_measured_again(site: Site) -> None:
    run = Tripping(site, "ecc")
    run.file.write_text(f"RuntimeError {ECC}")
    said = run.train()
    [first] = run.attempts()
    assert first["class"] == "infrastructure"
    assert first["faults"] == {"local1": "gpu_memory_error"}
    assert first["retest"] == "local1 had this: uncorrectable memory error of a GPU"
    assert (
        f"RuntimeError: CUDA error: uncorrectable ECC error encountered (line {run.line} of {run.folder}/code/gpt.py: "
        in said
    )
    [failed] = [event for event in run.events(0) if event.kind == "failed"]
    assert (failed.data["node"], failed.data["rank"], failed.data["device"]) == ("local1", 1, "local1:cpu0")
    assert failed.data["error"]["message"] == ECC.strip()
    run.file.unlink()
    run.resume()
    assert run.attempts()[1]["class"] == "done", run.attempts()
    assert "probed" in [event.kind for event in run.events(1)]
    assert (run.folder / "topology-before.json").exists()


def test_an_error_of_the_program_is_told_whole_and_measures_nothing(site: Site) -> None:
    run = Tripping(site, "key")
    run.file.write_text("KeyError no such token: 'night'\nknown: 'day'")
    run.train()
    run.resume()
    for attempt, line in enumerate(run.attempts()):
        assert line["class"] == "fatal"
        assert line["faults"] == {"local1": "exception"}
        [failed] = [event for event in run.events(attempt) if event.kind == "failed"]
        assert line["reason"] == failed.reason
        assert failed.reason.startswith("local1: rank 1 in step 1, ")
        message = "KeyError: \"no such token: 'night'\\nknown: 'day'\""
        assert f"{message} (line {run.line} of {run.folder}/code/gpt.py: " in failed.reason
        error = failed.data["error"]
        assert (error["kind"], error["where"], error["step"]) == (
            "KeyError",
            f"{run.folder}/code/gpt.py:{run.line} in trip",
            1,
        )
        assert "probed" not in [event.kind for event in run.events(attempt)]
    # Twice on that node alone: the next attempt measures it, and finds nothing.
    assert run.attempts()[1]["suspect"] == "local1"
    run.resume()
    assert "probed" in [event.kind for event in run.events(2)]
    assert run.attempts()[2]["class"] == "fatal"
    assert "suspect" not in run.attempts()[2]
