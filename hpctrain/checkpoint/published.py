"""Published checkpoints, which are whole: search, verification, publication, pruning. The module imports no torch,
because agents use it too.

torch's checkpoint format unpickles its metadata, which could run code. So nothing of a checkpoint is loaded before
owner, mode and hash of every file have been compared with the manifest that the run wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import storage_errors, sync, write_text
from hpctrain.base.errors import CheckpointError, FileError, InputError, Superseded, UntrustedError
from hpctrain.base.owned_files import OwnedFolder
from hpctrain.base.regular_file import sha256_of
from hpctrain.records.history.generation import Fence
from hpctrain.records.history.manifest import FileEntry, Manifest

MANIFEST = "manifest.json"
LATEST = "latest"
_NAME = re.compile(r"step-[0-9]{8,18}")


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that may be loaded, because all its files have the hashes in its manifest."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that may not be loaded, and the reason in words."""

    path: Path
    reason: str


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint folder, as 'step-00000100'."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path | None) -> int:
    """Return the step of a checkpoint, by the name of its folder; 0 for None, the model before training."""
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))


def newest(
    checkpoints: Path, model_sha256: str | None = None
) -> tuple[VerifiedCheckpoint | None, list[SkippedCheckpoint]]:
    """Return the newest checkpoint that verifies (None if there is none), and the newer ones that were skipped.

    Args:
        checkpoints: the run's folder `checkpoints`; it may be missing.
        model_sha256: hash of the run's model; checkpoints of another model are skipped too. None: any model.
    """
    skipped: list[SkippedCheckpoint] = []
    for path in reversed(listed(checkpoints)):
        try:
            manifest = verify(path)
            if model_sha256 is not None and manifest.model_sha256 != model_sha256:
                raise CheckpointError("it is of another model")
        except CheckpointError as error:
            skipped.append(SkippedCheckpoint(path, str(error)))
        else:
            return VerifiedCheckpoint(path, manifest), skipped
    return None, skipped


def listed(checkpoints: Path) -> list[Path]:
    """Return the folders of the published checkpoints, oldest step first; unfinished ones have other names."""
    return sorted(path for path in checkpoints.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir())


def verify(path: Path, hashes: bool = True) -> Manifest:
    """Check owner, mode, size and hash of every file of the checkpoint folder `path`, and return its manifest.

    Args:
        hashes: whether to check hashes. A worker passes False, because the proposer of its generation has just verified
            the checkpoint in full, and reading every byte again would take as long as loading.

    Raises:
        CheckpointError: a file is missing, wrong or unknown to the manifest; the message names the file.
    """
    try:
        with OwnedFolder(path) as folder:
            return _verify_files(folder, hashes)
    except UntrustedError as error:
        raise CheckpointError(f"{Path(error.path).name} {error.reason}") from None
    except OSError as error:
        raise CheckpointError(f"{Path(error.filename or path).name} cannot be read ({error.strerror})") from None


def describe_file(path: Path) -> FileEntry:
    """Return a file's entry for the manifest: name, size and hash."""
    with path.open("rb") as file:
        return FileEntry(name=path.name, size_bytes=path.stat().st_size, sha256=sha256_of(file.fileno()))


def publish(temporary: Path, manifest: Manifest, fence: Fence) -> Path:
    """Rename the finished checkpoint folder `temporary` to its final name, and return the new path. The checkpoint is
    then durable, and the file `latest` names it.

    A new generation removes the unpublished checkpoints of the previous one (`discard_unfinished`). So a writer of an
    old generation that was suspended between the fence and the rename finds nothing to rename.

    Raises:
        StorageError: the disk is full or read-only; earlier checkpoints are unchanged.
        Superseded: the writer's generation is over, or a later generation has published the same step.
    """
    checkpoints = temporary.parent
    final = checkpoints / folder_name(manifest.step)
    manifest.write(temporary / MANIFEST)
    fence.check()
    known = -1
    with contextlib.suppress(InputError):
        known = Manifest.read(final / MANIFEST, owned=True).generation
    if known > manifest.generation:
        raise Superseded(
            f"{final.name} was written by generation {known}; that of generation {manifest.generation} is too late"
        )
    with storage_errors(final):
        if final.exists():
            # An older generation's checkpoint of this step, which the new one replaces.
            aside = checkpoints / f".replaced-{final.name}"
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
            temporary.rename(final)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            temporary.rename(final)
        sync(checkpoints)
    fence.check()
    write_text(checkpoints / LATEST, final.name + "\n")
    return final


def prune(checkpoints: Path, keep: int, current: Path) -> None:
    """Remove all checkpoints except `current`, which was just published, and the newest `keep` − 1 before it.

    A checkpoint of a later step than `current` is from an earlier attempt, and the run did not resume from it; so it is
    removed too.
    """
    before = [path for path in listed(checkpoints) if path.name < current.name]
    remaining = {current, *before[max(0, len(before) - (keep - 1)) :]}
    for path in listed(checkpoints):
        if path not in remaining:
            remove(path)


def remove(path: Path) -> None:
    """Rename a checkpoint folder, then delete it. So a process that is killed in between leaves no folder that looks
    like a whole checkpoint."""
    going = path.with_name(f".removed-{path.name}")
    shutil.rmtree(going, ignore_errors=True)
    with contextlib.suppress(OSError):  # a folder that cannot be renamed is deleted in place
        path.rename(going)
    shutil.rmtree(going, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def quarantine(path: Path) -> str | None:
    """Rename a checkpoint that cannot be used, so that you can inspect it. Return the new name, 'skipped-step-…'; None
    if renaming failed."""
    aside = path.with_name(f"skipped-{path.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    except OSError:
        return None
    return aside.name


def discard_unfinished(checkpoints: Path) -> None:
    """Remove unfinished checkpoints of killed writers. If a writer was killed while it replaced a checkpoint of the
    same step, the old checkpoint is restored.

    Call this only while no worker runs.
    """
    for path in (*checkpoints.glob(".step-*.tmp"), *checkpoints.glob(".removed-*")):
        shutil.rmtree(path, ignore_errors=True)
    for path in checkpoints.glob(".replaced-*"):
        final = checkpoints / path.name.removeprefix(".replaced-")
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(final)


def _verify_files(folder: OwnedFolder, hashes: bool) -> Manifest:
    try:
        manifest = Manifest.from_json(json.loads(folder.read(MANIFEST)))
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (FileError, ValueError, RecursionError) as error:
        raise CheckpointError(f"its manifest cannot be read ({error})") from None
    known = {entry.name for entry in manifest.files} | {MANIFEST}
    strangers = sorted(set(folder.names()) - known)
    if strangers:
        raise CheckpointError(f"it holds {strangers[0]}, which its manifest does not name")
    for entry in manifest.files:
        _verify_file(folder, entry, hashes)
    return manifest


def _verify_file(folder: OwnedFolder, entry: FileEntry, hashes: bool) -> None:
    try:
        descriptor = folder.open(entry.name)
    except FileNotFoundError:
        raise CheckpointError(f"{entry.name} is missing") from None
    try:
        size = os.fstat(descriptor).st_size
        if size != entry.size_bytes:
            raise CheckpointError(f"{entry.name} has {size} bytes, {entry.size_bytes} were written")
        if hashes and sha256_of(descriptor) != entry.sha256:
            raise CheckpointError(f"{entry.name} is not what was written (its hash differs)")
    finally:
        os.close(descriptor)
