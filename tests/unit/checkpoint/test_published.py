"""Checkpoints on disk: only what verifies is ever opened; what was good before stays good."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.base.errors import CheckpointError, DamagedCheckpointError, StorageError, Superseded
from hpctrain.checkpoint import published
from hpctrain.records.history.generation import Fence, record_file
from hpctrain.records.history.manifest import Manifest


def make(checkpoints: Path, step: int, content: bytes = b"shard", model: str = "m", generation: int = 0) -> Path:
    temporary = checkpoints / f".{published.folder_name(step)}.gen-{generation}.tmp"
    temporary.mkdir(parents=True)
    (temporary / "__0_0.distcp").write_bytes(content)
    (temporary / ".metadata").write_bytes(b"metadata")
    files = [published.describe_file(path) for path in sorted(temporary.iterdir())]
    manifest = Manifest(
        step=step, generation=generation, samples=step, seed=0, run_sha256="r", model_sha256=model, world_size=1,
        files=files,
    )  # fmt: skip
    return published.publish(temporary, manifest, Fence(checkpoints / "generations", generation))


def test_newest_is_the_last_published(tmp_path: Path) -> None:
    make(tmp_path, 50)
    make(tmp_path, 100)
    found, skipped = published.newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 100
    assert skipped == []
    assert (tmp_path / "latest").read_text() == "step-00000100\n"


def truncate(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(b"sha")


def flip(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(b"shar\x00")


def open_to_others(path: Path) -> None:
    (path / "__0_0.distcp").chmod(0o666)


def add_stranger(path: Path) -> None:
    (path / "evil.pkl").write_bytes(b"")


def lose_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def tear_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def link_elsewhere(path: Path) -> None:
    target = path.parent / "elsewhere"
    target.write_bytes(b"shard")
    (path / "__0_0.distcp").unlink()
    (path / "__0_0.distcp").symlink_to(target)


def fifo_for_a_shard(path: Path) -> None:
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")


def fifo_for_the_manifest(path: Path) -> None:
    lose_manifest(path)
    os.mkfifo(path / "manifest.json")


def name_elsewhere(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(b"shard")
    (path / "__0_0.distcp").unlink()
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("__0_0.distcp", "../elsewhere"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "__0_0.distcp has 3 bytes, 5 were written"),
        (flip, "__0_0.distcp is not what was written (its hash differs)"),
        (open_to_others, "__0_0.distcp can be written by others (mode 666)"),
        (add_stranger, "it holds evil.pkl, which its manifest does not name"),
        (lose_metadata, ".metadata is missing"),
        (lose_manifest, "manifest.json is missing"),
        (tear_manifest, "its manifest cannot be read"),
        (link_elsewhere, "__0_0.distcp is a symbolic link"),
        (fifo_for_a_shard, "__0_0.distcp is a FIFO"),
        (fifo_for_the_manifest, "manifest.json is a FIFO"),
        (name_elsewhere, "elsewhere"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(damage: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    make(tmp_path, 50)
    damage(make(tmp_path, 100))
    found, skipped = published.newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 50
    assert [item.path.name for item in skipped] == ["step-00000100"]
    assert reason in skipped[0].reason


def test_a_checkpoint_of_another_model_is_passed_over(tmp_path: Path) -> None:
    make(tmp_path, 50, model="other")
    found, skipped = published.newest(tmp_path, "m")
    assert found is None
    assert skipped[0].reason == "it is of another model"


@pytest.mark.requires("root")
def test_a_checkpoint_of_another_user_is_not_opened(tmp_path: Path) -> None:
    path = make(tmp_path, 50)
    os.chown(path / ".metadata", 65534, 65534)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        published.verify(path)


def test_the_same_step_again_replaces_the_older_one(tmp_path: Path) -> None:
    make(tmp_path, 50, b"old")
    make(tmp_path, 50, b"new!!")
    found, _ = published.newest(tmp_path)
    assert found is not None
    assert (found.path / "__0_0.distcp").read_bytes() == b"new!!"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000050"]


def test_what_a_killed_writer_left_is_removed_and_what_it_put_aside_comes_back(tmp_path: Path) -> None:
    make(tmp_path, 50)
    (tmp_path / ".step-00000100.gen-3.tmp").mkdir()
    (tmp_path / "step-00000050").rename(tmp_path / ".replaced-step-00000050")
    published.discard_unfinished(tmp_path)
    assert [path.name for path in published.listed(tmp_path)] == ["step-00000050"]
    assert published.newest(tmp_path)[0] is not None


@pytest.mark.parametrize("keep", range(1, 7))
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    steps = list(range(10, 90, 10))
    for count, step in enumerate(steps, 1):
        published.prune(tmp_path, keep, make(tmp_path, step))
        expected = [f"step-{step:08}" for step in steps[max(0, count - keep) : count]]
        assert [path.name for path in published.listed(tmp_path)] == expected


def test_what_was_just_published_is_kept_whatever_lies_beside_it(tmp_path: Path) -> None:
    make(tmp_path, 50)
    current = make(tmp_path, 8)
    published.prune(tmp_path, 1, current)
    assert [path.name for path in published.listed(tmp_path)] == ["step-00000008"]


def test_a_checkpoint_that_cannot_be_used_is_put_aside(tmp_path: Path) -> None:
    damaged = make(tmp_path, 50)
    assert published.quarantine(damaged) == "skipped-step-00000050"
    assert published.listed(tmp_path) == []
    assert (tmp_path / "skipped-step-00000050" / "manifest.json").exists()


def test_one_that_was_put_aside_before_stays(tmp_path: Path) -> None:
    for content, name in ((b"first", "skipped-step-00000050"), (b"again", "skipped-step-00000050.2")):
        damaged = make(tmp_path, 50, content)
        assert published.quarantine(damaged) == name
        assert published.quarantine(damaged) is None, "another process did it"
        assert (tmp_path / name / "__0_0.distcp").read_bytes() == content


def test_what_was_put_aside_gets_its_name_back_unless_another_one_has_it(tmp_path: Path) -> None:
    aside = published.quarantine(make(tmp_path, 50))
    assert aside is not None
    published.undo_quarantine(tmp_path, aside, "../step-00000050")
    published.undo_quarantine(tmp_path, f"../{tmp_path.name}/{aside}", "step-00000050")
    assert published.listed(tmp_path) == []
    published.undo_quarantine(tmp_path, aside, "step-00000050")
    assert [path.name for path in published.listed(tmp_path)] == ["step-00000050"]
    aside = published.quarantine(tmp_path / "step-00000050")
    assert aside is not None
    make(tmp_path, 50, b"other")
    published.undo_quarantine(tmp_path, aside, "step-00000050")
    assert (tmp_path / "step-00000050" / "__0_0.distcp").read_bytes() == b"other"
    assert (tmp_path / aside).is_dir()


def test_without_hashes_only_that_of_the_metadata_is_checked(tmp_path: Path) -> None:
    flip(make(tmp_path, 50))
    found, skipped = published.newest(tmp_path, hashes=False)
    assert found is not None
    assert skipped == []
    (tmp_path / "step-00000050" / ".metadata").write_bytes(b"metadatA")
    with pytest.raises(DamagedCheckpointError, match=r"^\.metadata is not what was written"):
        published.verify(tmp_path / "step-00000050", hashes=False)


def test_no_checkpoints_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert published.newest(tmp_path / "none") == (None, [])


@pytest.mark.parametrize("name", ["../../../.bash_profile", "/etc/passwd", "..", ".hidden", "a/b", "a\0b", "x" * 300])
def test_a_manifest_that_names_a_file_elsewhere_is_passed_over(name: str, tmp_path: Path) -> None:
    make(tmp_path, 50)
    newer = make(tmp_path, 100)
    manifest = json.loads((newer / "manifest.json").read_text())
    manifest["files"][0]["name"] = name
    (newer / "manifest.json").write_text(json.dumps(manifest))
    found, (skipped,) = published.newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 50
    assert "its manifest cannot be read" in skipped.reason
    assert "files[0].name: found " in skipped.reason


def decide(checkpoints: Path, generation: int) -> None:
    """The record of a generation that the agents agreed on."""
    path = record_file(checkpoints / "generations", generation)
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")


def test_a_writer_of_a_past_generation_publishes_nothing(tmp_path: Path) -> None:
    decide(tmp_path, 0)
    make(tmp_path, 50)
    decide(tmp_path, 1)
    with pytest.raises(Superseded, match="generation 0 is over: generation 1 began meanwhile"):
        make(tmp_path, 60)
    assert [path.name for path in published.listed(tmp_path)] == ["step-00000050"]
    assert (tmp_path / "latest").read_text() == "step-00000050\n"
    assert make(tmp_path, 60, generation=1).name == "step-00000060"


def test_a_step_that_a_later_generation_published_stays_its_own(tmp_path: Path) -> None:
    make(tmp_path, 50, b"later", generation=3)
    with pytest.raises(Superseded, match="step-00000050 was written by generation 3"):
        make(tmp_path, 50, b"late", generation=2)
    found, skipped = published.newest(tmp_path)
    assert found is not None
    assert (found.manifest.generation, skipped) == (3, [])


def test_a_writer_that_slept_past_the_fence_finds_nothing_to_publish(tmp_path: Path) -> None:
    """What the next generation does before it is decided: it clears away what is unfinished."""

    class Sleeper(Fence):
        def check(self) -> None:
            super().check()
            published.discard_unfinished(tmp_path)
            decide(tmp_path, 1)

    make(tmp_path, 50)
    temporary = tmp_path / ".step-00000060.gen-0.tmp"
    temporary.mkdir()
    manifest = published.verify(tmp_path / "step-00000050").model_copy(update={"step": 60, "files": []})
    with pytest.raises(StorageError):
        published.publish(temporary, manifest, Sleeper(tmp_path / "generations", 0))
    assert (tmp_path / "latest").read_text() == "step-00000050\n"
    assert [path.name for path in published.listed(tmp_path)] == ["step-00000050"]
