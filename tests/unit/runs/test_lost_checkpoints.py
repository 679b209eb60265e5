"""A run that had saved its state never begins again from the seed by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpctrain.checkpoint import published
from hpctrain.records.history.generation import Fence
from hpctrain.records.history.manifest import Manifest
from hpctrain.records.history.run_log import Event, EventKind, read_events
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.lost_checkpoints import lost_checkpoints_text, restarting_from_seed, saved_step


def event(kind: EventKind, **data: object) -> Event:
    return Event(time_s=0, attempt=0, generation=0, node="gpu1", kind=kind, reason=kind, data=data)


def save(folder: Path, step: int) -> Path:
    temporary = folder / "checkpoints" / f".{step}"
    temporary.mkdir(parents=True)
    (temporary / "0.distcp").write_bytes(b"weights")
    manifest = Manifest(
        step=step, generation=0, samples=step, seed=0, run_sha256="", model_sha256="m", world_size=1,
        files=[published.describe_file(temporary / "0.distcp")],
    )  # fmt: skip
    path = published.publish(temporary, manifest, Fence(folder / "generations", 0))
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event("checkpoint_saved", step=step).to_json()) + "\n")
    return path


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ([], None),
        ([event("checkpoint_skipped", step=5)], None),
        ([event("checkpoint_saved", step=5), event("checkpoint_saved", step=10)], 10),
        # After a fault the steps go on from an older checkpoint; the newest of all is what may be lost.
        ([event("checkpoint_saved", step=10), event("checkpoint_saved", step=5)], 10),
        ([event("checkpoint_saved", step=10), event("from_seed")], None),
        ([event("checkpoint_saved", step=10), event("from_seed"), event("checkpoint_saved", step=5)], 5),
    ],
)
def test_what_was_saved_since_the_seed(events: list[Event], step: int | None) -> None:
    assert saved_step(events) == step


def test_a_run_with_a_usable_checkpoint_or_none_ever_goes_on(tmp_path: Path) -> None:
    assert lost_checkpoints_text(tmp_path) is None
    older = save(tmp_path, 5)
    assert lost_checkpoints_text(tmp_path) is None
    newer = save(tmp_path, 10)
    (newer / "0.distcp").write_bytes(b"half")
    assert lost_checkpoints_text(tmp_path) is None
    shutil.rmtree(older)
    words = lost_checkpoints_text(tmp_path)
    assert words is not None
    assert words.startswith(
        "all checkpoints are lost: step 10 was saved, and none of those in checkpoints can be used (step-00000010: "
        "0.distcp has 4 bytes, 7 were written)"
    )
    shutil.rmtree(newer)
    words = lost_checkpoints_text(tmp_path)
    assert words is not None
    assert "step 10 was saved, and none is there now" in words
    assert f"hpctrain resubmit {tmp_path.name} --from-seed" in words


def test_what_was_put_aside_is_named(tmp_path: Path) -> None:
    published.quarantine(save(tmp_path, 10))
    words = lost_checkpoints_text(tmp_path)
    assert words is not None
    assert "only skipped-step-00000010 is there, which could not be used" in words


def test_who_asks_begins_again_and_loses_nothing_of_what_is_there(tmp_path: Path) -> None:
    save(tmp_path, 10)
    before = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(KeyboardInterrupt), restarting_from_seed(RunFolder(tmp_path), 4.0):
        raise KeyboardInterrupt
    assert (tmp_path / "events.jsonl").read_bytes() == before, "what failed leaves all as it was"
    assert [path.name for path in (tmp_path / "checkpoints").glob("*step-*")] == ["step-00000010"]
    with restarting_from_seed(RunFolder(tmp_path), 5.0) as aside:
        assert aside == ["skipped-step-00000010"]
    assert published.listed(tmp_path / "checkpoints") == []
    assert lost_checkpoints_text(tmp_path) is None
    last = read_events(tmp_path / "events.jsonl")[-1]
    assert (last.kind, last.attempt, last.data) == ("from_seed", 0, {"saved": 10, "aside": ["skipped-step-00000010"]})
