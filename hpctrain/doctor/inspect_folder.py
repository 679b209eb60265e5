"""Test a folder: perform each file operation that a run relies on once, with the code that a run uses."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.errors import HpctrainError, StorageError
from hpctrain.doctor.facts import FolderFacts, LocalDisk
from hpctrain.report.status import lock_held
from hpctrain.runs.file_system import file_system_of, is_shared, mount_options
from hpctrain.runs.folder import lock_run_folder
from hpctrain.runs.locate import RUNS_VARIABLE


def inspect_runs_folder(runs: Path, environ: Mapping[str, str]) -> FolderFacts:
    """Return facts about the folder of run folders, and whether renaming, locking and linking work in it.

    The test uses a temporary folder, which is removed. A folder that does not exist is not made; its nearest existing
    parent is tested instead.
    """
    path = runs.expanduser().resolve()
    there = _nearest(path)
    rename, lock, link = _try_in(there) if not path.is_file() else ("it is a file, not a folder",) * 3
    return FolderFacts(
        path=path,
        kind=file_system_of(there),
        options=mount_options(there),
        free_bytes=shutil.disk_usage(there).free,
        from_variable=bool(environ.get(RUNS_VARIABLE)),
        rename=rename,
        lock=lock,
        link=link,
    )


def inspect_local_disks(environ: Mapping[str, str]) -> tuple[LocalDisk, ...]:
    """Return the usual folders for temporary files, without those on a shared file system."""
    places = dict.fromkeys(Path(place) for place in (environ.get("TMPDIR") or "/tmp", "/tmp", "/scratch", "/dev/shm"))
    disks = [
        LocalDisk(place, file_system_of(place), shutil.disk_usage(place).free) for place in places if place.is_dir()
    ]
    return tuple(disk for disk in disks if not is_shared(disk.kind))


def _nearest(path: Path) -> Path:
    while True:
        with contextlib.suppress(PermissionError):  # the parent folder may not be readable
            if path.is_dir():
                return path
        path = path.parent


def _try_in(folder: Path) -> tuple[str, str, str]:
    """Return what went wrong in the tests of rename, lock and link, in this order; '' where nothing did."""
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".hpctrain-doctor-", dir=folder))
    except OSError as error:
        return (f"nothing can be written there: {error.strerror or error}",) * 3
    try:
        return _tried(_rename, scratch), _tried(_lock, scratch), _tried(_link, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tried(trial: Callable[[Path], str], folder: Path) -> str:
    try:
        return trial(folder)
    except OSError as error:
        return error.strerror or str(error)
    except StorageError as error:
        # The message of the StorageError names a temporary file that no longer exists; its cause does not.
        cause = error.__cause__
        return (cause.strerror if isinstance(cause, OSError) else None) or str(error)
    except HpctrainError as error:
        return str(error)


def _rename(folder: Path) -> str:
    """Replace a file by another one; return what went wrong, or '' if nothing did."""
    path = folder / "file"
    for text in ("first", "second"):
        write_text(path, text)
    return "" if path.read_text() == "second" else "the old file is still there after it was replaced"


def _lock(folder: Path) -> str:
    """Lock and release a run folder, and check the lock as `hpctrain status` does; return what went wrong, or ''."""
    with lock_run_folder(folder):
        held = lock_held(folder)
    if not held:
        return "a lock that is held looks free"
    return "a lock that was given back looks held" if lock_held(folder) else ""


def _link(folder: Path) -> str:
    """Check that a second hard link to one name is refused; return what went wrong, or ''."""
    (folder / "proposal").write_text("")
    os.link(folder / "proposal", folder / "decided")
    try:
        os.link(folder / "proposal", folder / "decided")
    except FileExistsError:
        return ""
    return "a name can be taken twice"
