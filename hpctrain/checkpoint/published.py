"""Published checkpoints, which are whole: search, verification, publication, pruning. The module imports no torch,
because agents use it too.

torch's checkpoint format unpickles its metadata, which could run code. So the metadata is read only with the hash that
the run wrote to the manifest, and every other file only with the right owner, mode and size. The hashes of the other
files take long. The processes that load them share this work (`load.CheckpointReader`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import storage_errors, sync, write_text
from hpctrain.base.errors import (
    CheckpointError,
    DamagedCheckpointError,
    FileError,
    InputError,
    Superseded,
    UntrustedError,
)
from hpctrain.base.owned_files import OwnedFolder
from hpctrain.base.regular_file import read_and_close, sha256_of
from hpctrain.records.history.generation import Fence
from hpctrain.records.history.manifest import FileEntry, Manifest

MANIFEST = "manifest.json"
METADATA = ".metadata"
"""Name of the file that says which file holds which tensor. DCP unpickles it."""
LATEST = "latest"
_NAME = re.compile(r"step-[0-9]{8,18}")
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the system that say nothing about the file that was opened."""


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that may be loaded, because its files are those in its manifest."""

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
    """Return the step of a checkpoint, by the name of its folder; 0 for None, the model before training.

    Raises:
        ValueError: the folder is not called 'step-' and a number.
    """
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))


def newest(
    checkpoints: Path, model_sha256: str | None = None, hashes: bool = True
) -> tuple[VerifiedCheckpoint | None, list[SkippedCheckpoint]]:
    """Return the newest checkpoint that verifies (None if there is none), and the newer ones that were skipped.

    Args:
        checkpoints: the run's folder `checkpoints`; it may be missing.
        model_sha256: hash of the run's model; checkpoints of another model are skipped too. None: any model.
        hashes: as of `verify`.
    """
    return last_verified(listed(checkpoints), model_sha256, hashes)


def last_verified(
    paths: Sequence[Path], model_sha256: str | None, hashes: bool
) -> tuple[VerifiedCheckpoint | None, list[SkippedCheckpoint]]:
    """Return the last checkpoint that verifies (None if there is none), and those after it, which were skipped.

    Args:
        paths: folders of checkpoints, oldest first.
        model_sha256: as of `newest`.
        hashes: as of `verify`.
    """
    skipped: list[SkippedCheckpoint] = []
    for path in reversed(paths):
        try:
            manifest = verify(path, hashes)
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
    """Check owner, mode and size of every file of the checkpoint folder `path` and the hash of its `.metadata`. Return
    the checkpoint's manifest.

    Args:
        hashes: whether to check the hashes of the other files, too. That takes as long as reading the checkpoint.

    Raises:
        DamagedCheckpointError: a file is missing, wrong or unknown to the manifest; the message names the file.
        CheckpointError: this process has no memory or no descriptors left.
    """
    manifest = read_manifest(path)
    with _opened(path) as folder:
        known = {entry.name for entry in manifest.files} | {MANIFEST}
        strangers = sorted(set(folder.names()) - known)
        if strangers:
            raise DamagedCheckpointError(f"it holds {strangers[0]}, which its manifest does not name")
        for entry in manifest.files:
            with _open_entry(folder, entry) as descriptor:
                if hashes or entry.name == METADATA:
                    _check_hash(entry, sha256_of(descriptor))
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint folder `path`.

    Raises:
        DamagedCheckpointError: the manifest is missing, cannot be read, or can be written by others.
        CheckpointError: this process has no memory or no descriptors left.
    """
    with _opened(path) as folder:
        try:
            return Manifest.from_json(json.loads(folder.read(MANIFEST)))
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{MANIFEST} is missing") from None
        except (FileError, ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"its manifest cannot be read ({error})") from None


@contextlib.contextmanager
def open_file(path: Path, entry: FileEntry) -> Iterator[int]:
    """Yield a descriptor for reading a file of the checkpoint folder `path`, after checking owner, mode and size. Close
    the descriptor at the end.

    Raises:
        DamagedCheckpointError: the file is missing, has another owner, mode or size, or cannot be read in the `with`
            block.
        CheckpointError: this process has no memory or no descriptors left.
    """
    with _opened(path) as folder, _open_entry(folder, entry) as descriptor:
        yield descriptor


def check_hash(path: Path, entry: FileEntry) -> None:
    """Check owner, mode, size and hash of one file of the checkpoint folder `path`.

    Raises:
        DamagedCheckpointError: the file is missing or wrong.
        CheckpointError: this process has no memory or no descriptors left.
    """
    with open_file(path, entry) as descriptor:
        _check_hash(entry, sha256_of(descriptor))


def read_file(path: Path, entry: FileEntry) -> bytes:
    """Return the content of one file of the checkpoint folder `path`, after checking owner, mode, size and hash.

    Raises:
        DamagedCheckpointError: the file is missing or wrong.
        CheckpointError: this process has no memory or no descriptors left.
    """
    with open_file(path, entry) as descriptor:
        content = read_and_close(os.dup(descriptor), path / entry.name, entry.size_bytes)
    _check_hash(entry, hashlib.sha256(content).hexdigest())
    return content


def describe_file(path: Path) -> FileEntry:
    """Return a file's entry for the manifest: name, size and hash.

    Raises:
        OSError: the file cannot be read.
    """
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
    """Rename a checkpoint that cannot be used, so that you can inspect it. Return the new name: 'skipped-step-…', with
    a number at its end if another checkpoint has that name already. Return None if renaming failed, for example because
    another process has renamed the checkpoint."""
    number = 1
    while True:
        aside = path.with_name(f"skipped-{path.name}" + (f".{number}" if number > 1 else ""))
        try:
            path.rename(aside)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                return None
            number += 1
        else:
            return aside.name


def undo_quarantine(checkpoints: Path, aside: str, name: str) -> None:
    """Give a checkpoint that `quarantine` renamed its name back, if no other one has it now.

    Args:
        checkpoints: the run's folder `checkpoints`.
        aside: the name of the checkpoint now.
        name: its name before.
    """
    if Path(aside).name == aside and _NAME.fullmatch(name):
        with contextlib.suppress(OSError):  # it is gone, or the name is taken
            (checkpoints / aside).rename(checkpoints / name)


def discard_unfinished(checkpoints: Path) -> None:
    """Remove unfinished checkpoints of killed writers. If a writer was killed while it replaced a checkpoint of the
    same step, the old checkpoint is restored.

    Call this only while no worker runs.

    Raises:
        OSError: the old checkpoint cannot be renamed.
    """
    for path in (*checkpoints.glob(".step-*.tmp"), *checkpoints.glob(".removed-*")):
        shutil.rmtree(path, ignore_errors=True)
    for path in checkpoints.glob(".replaced-*"):
        final = checkpoints / path.name.removeprefix(".replaced-")
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(final)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[OwnedFolder]:
    """Yield the open folder `path`. Errors of the system, and files of others, become DamagedCheckpointError, or
    CheckpointError if this process lacks memory or descriptors."""
    try:
        with OwnedFolder(path) as folder:
            yield folder
    except UntrustedError as error:
        raise DamagedCheckpointError(f"{Path(error.path).name} {error.reason}") from None
    except OSError as error:
        words = f"{Path(error.filename or path).name} cannot be read ({error.strerror})"
        if error.errno in _EXHAUSTED:
            raise CheckpointError(words) from error
        raise DamagedCheckpointError(words) from None


@contextlib.contextmanager
def _open_entry(folder: OwnedFolder, entry: FileEntry) -> Iterator[int]:
    try:
        descriptor = folder.open(entry.name)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{entry.name} is missing") from None
    try:
        size = os.fstat(descriptor).st_size
        if size != entry.size_bytes:
            raise DamagedCheckpointError(f"{entry.name} has {size} bytes, {entry.size_bytes} were written")
        yield descriptor
    finally:
        os.close(descriptor)


def _check_hash(entry: FileEntry, sha256: str) -> None:
    if sha256 != entry.sha256:
        raise DamagedCheckpointError(f"{entry.name} is not what was written (its hash differs)")
