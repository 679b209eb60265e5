"""ended_runs.json: statuses of runs that have ended, so that `hpctrain list` reads their files only once.

The file lies beside history.jsonl. It may be removed at any time: it holds only what the run folders say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.errors import InputError, StorageError
from hpctrain.base.owned_files import OwnedFolder
from hpctrain.records.format.document import Document, Part
from hpctrain.records.history.past_runs import state_folder


class EndedRun(Part):
    """The status of a run that had ended, and the state of the files from which it was read."""

    files: str
    """Size, inode and time of change of each file that was read. The entry holds only while they are the same."""
    read_s: float
    """When the files were read, seconds since 1970."""
    status: dict[str, Any]
    """All fields of the run's status by its files, without Slurm's answer."""
    jobs: list[str]
    """Ids of the run's newest job and its successors; [] for a run that is done, or that is no Slurm job."""


class EndedRuns(Document):
    """The file ended_runs.json."""

    schema_kind: ClassVar[str] = "ended_runs"

    runs: dict[str, EndedRun]
    """Path of a run folder -> its entry."""


def ended_runs_file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of ended_runs.json in the folder that `state_folder` returns; None if there is no such folder."""
    folder = state_folder(environ)
    return None if folder is None else folder / "ended_runs.json"


def read_ended_runs(path: Path | None) -> dict[str, EndedRun]:
    """Return the entries of ended_runs.json at `path`, by run folder; {} if there is no file, if this version of
    hpctrain cannot read it, or if it is not trusted."""
    try:
        return {} if path is None else EndedRuns.read(path, owned=True).runs
    except InputError:
        return {}


def write_ended_runs(path: Path | None, runs: Mapping[str, EndedRun]) -> None:
    """Replace ended_runs.json at `path` at once, so that only its owner can read it. Nothing is written if `path` is
    None, if the file cannot be written, as on a full disk, or if the folder is not trusted. Of several writers, the
    last one wins."""
    if path is None:
        return
    values = EndedRuns(runs=dict(runs)).to_json()
    try:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            OwnedFolder(path.parent).close()
        write_text(path, json.dumps(values, allow_nan=False) + "\n", 0o600)
    except (InputError, StorageError):
        return
