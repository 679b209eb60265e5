"""history.jsonl: the runs that a user started, wherever their run folders are. Lines are appended and never changed.

The file is in the home folder, which is often on NFS, where databases with their own locks break. So writers append
whole lines, and readers skip an incomplete line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from hpctrain.base.atomic import append_line, storage_errors
from hpctrain.base.errors import FileError, InputError, StorageError
from hpctrain.records.format.document import Document
from hpctrain.records.format.input_file import read_jsonl

STATE_VARIABLE = "XDG_STATE_HOME"
LINE_BYTES_MAX = 4096
"""Longest line in bytes (PIPE_BUF); in a longer line, the write of another process could end up in the middle."""
LOCK_TRIES = 20
LOCK_PAUSE_S = 0.05


class PastRun(Document):
    """A line of history.jsonl: one start of a run."""

    schema_kind: ClassVar[str] = "past_run"

    time_s: float
    """When the run was started, seconds since 1970."""
    verb: Literal["submit", "resubmit", "train"]
    """The command of hpctrain that started the run."""
    name: str
    """Name of the run."""
    folder: str
    """Absolute path of the run folder."""
    job_id: str | None = None
    """Id of the job that was submitted, or of the background process of a run that `submit` started on this machine;
    absent for a run of `train`."""
    cluster: str | None = None
    """Slurm's name of the cluster; absent if unknown."""


def history_file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of history.jsonl in the folder that `state_folder` returns; None if there is no such folder."""
    folder = state_folder(environ)
    return None if folder is None else folder / "history.jsonl"


def state_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder with this user's state of hpctrain, which may not exist yet: $XDG_STATE_HOME/hpctrain if
    `environ` has an absolute XDG_STATE_HOME, else $HOME/.local/state/hpctrain; None if HOME is no absolute path,
    either."""
    base, home = environ.get(STATE_VARIABLE, ""), environ.get("HOME", "")
    # The XDG specification requires that relative paths are ignored.
    if base.startswith("/"):
        return Path(base) / "hpctrain"
    return Path(home) / ".local" / "state" / "hpctrain" if home.startswith("/") else None


def append_past_run(path: Path, past: PastRun) -> None:
    """Append a line to history.jsonl at `path`. If the file does not exist, it is created so that only its owner can
    read it.

    Raises:
        StorageError: the file cannot be written, or the line is too long.
    """
    line = json.dumps(past.to_json(), allow_nan=False)
    if len(line.encode()) >= LINE_BYTES_MAX:
        raise StorageError(f"{path}: the line for {past.name} is too long; choose a run folder with a shorter path")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path):
            append_line(path, line)


def read_past_runs(environ: Mapping[str, str]) -> list[PastRun]:
    """Return the runs in this user's history.jsonl, oldest first. Incomplete lines and lines of other versions of
    hpctrain are left out. The list is empty if the file does not exist, cannot be read or is not trusted."""
    path, past_runs = history_file(environ), []
    try:
        values = read_jsonl(path) if path is not None else []
    except InputError:  # a file of somebody else, or one that cannot be read, counts as empty
        return []
    for value in values:
        try:
            past_runs.append(PastRun.from_json(value))
        except FileError:
            continue
    return past_runs


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file for at most one writer at a time. Without a lock, two NFS clients may append at the same
    offset; a client that takes the lock also refreshes the file's size. If the file system has no locks, or the lock is
    still taken after a second, the caller goes on without it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for _ in range(LOCK_TRIES):
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):  # another process holds it
                time.sleep(LOCK_PAUSE_S)
            except OSError:  # the file system has no locks
                break
        yield
    finally:
        os.close(descriptor)
