"""Workers find that a checkpoint is damaged: the run goes on from the one before, or says that none is left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from train_site import Outcome, Site

from hpctrain.checkpoint import published
from hpctrain.records.history.generation import GENERATIONS, Generation, record_file

pytestmark = pytest.mark.slow

FEW = ("--set", "steps=6", "--set", "checkpoint.every=2", "--set", "validation.batches=0")


@pytest.fixture(scope="module")
def saved(site: Site) -> Path:
    """The folder of a run on two nodes with checkpoints of the steps 2, 4 and 6."""
    first = site.train("run.yaml", "--local", "2", "--topology", "four.json", *FEW)
    assert first.code == 0, first.said
    assert first.folder is not None
    return first.folder


def flip(checkpoint: Path) -> None:
    """Change one byte of one file, which only its hash shows."""
    shard = max(checkpoint.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def resumed(site: Site, saved: Path, name: str, damaged: int) -> Outcome:
    """Go on with a copy of the run whose newest checkpoints, that many, are damaged."""
    folder = saved.with_name(name)
    shutil.copytree(saved, folder, symlinks=True)
    for checkpoint in published.listed(folder / "checkpoints")[-damaged:]:
        flip(checkpoint)
    done = site.train("--resume", str(folder), "--set", "steps=8", "--set", "recovery.retries=0")
    return Outcome(done.code, folder, done.said)


def test_each_damaged_checkpoint_costs_one_generation_and_no_retry(site: Site, saved: Path) -> None:
    outcome = resumed(site, saved, "two-damaged", 2)
    assert outcome.code == 0, outcome.said
    assert outcome.folder is not None
    events = [event for event in outcome.events if event.attempt == 1]
    skipped = [event for event in events if event.kind == "checkpoint_skipped"]
    assert [event.data for event in skipped] == [
        {"path": f"step-{step:08}", "now": f"skipped-step-{step:08}"} for step in (6, 4)
    ]
    assert all(event.reason.startswith(f"{event.data['path']}: __") for event in skipped)
    assert all("is not what was written (its hash differs)" in event.reason for event in skipped)
    started = [event for event in events if event.kind == "generation_started"]
    assert [event.data["restore"] for event in started] == [f"checkpoints/step-{step:08}" for step in (6, 4, 2)]
    assert [event.generation for event in skipped] == [event.generation for event in started[:2]]
    record = Generation.read(record_file(outcome.folder / GENERATIONS, started[-1].generation))
    assert (record.failures, record.newest_start) == (0, 2)
    assert record.reason.startswith("the checkpoint is damaged: step-00000004: __")
    assert "worker_died" not in {event.kind for event in events}
    assert [row.step for row in outcome.rows if row.generation == record.number] == list(range(3, 9))


def test_when_all_are_damaged_the_run_stops_and_they_keep_their_names(site: Site, saved: Path) -> None:
    outcome = resumed(site, saved, "all-damaged", 3)
    assert outcome.code == 4, outcome.said
    assert outcome.folder is not None
    lost = [event for event in outcome.events if event.kind == "checkpoints_lost"]
    assert len(lost) == 1
    assert "all checkpoints are lost: step 6 was saved, and none of those in checkpoints can be used" in lost[0].reason
    assert lost[0].reason.count("its hash differs") == 3
    assert [path.name for path in published.listed(outcome.folder / "checkpoints")] == [
        f"step-{step:08}" for step in (2, 4, 6)
    ]
    assert len(outcome.rows) == 6, "no step is done from the seed"
