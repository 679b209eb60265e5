"""The folders of sweeps. A sweep's folder has sweep.json, which names the sweep's run folders. The run folders lie
beside the sweep's folder, and their files do not name the sweep."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import storage_errors
from hpctrain.base.errors import InputError
from hpctrain.records.history.sweep import SWEEP_FILE, Sweep
from hpctrain.runs.locate import find_run_or_sweep, is_trusted_run, sweeps_in


@dataclass(frozen=True)
class NamedRuns:
    """What a person named: one run, or all runs of a sweep."""

    folder: Path
    """The run folder, or the folder of the sweep."""
    runs: list[Path]
    """The run folders, in the order of the sweep's tasks. Those that were removed are left out."""
    is_sweep: bool


def find_runs(name: str, environ: Mapping[str, str], cwd: Path) -> NamedRuns:
    """Return the run or the sweep of this name; the arguments are those of `find_run_or_sweep`.

    Raises:
        InputError: there is no such run or sweep, all runs of the sweep were removed, or sweep.json cannot be used.
    """
    folder = find_run_or_sweep(name, environ, cwd).resolve()
    if is_trusted_run(folder):
        return NamedRuns(folder, [folder], False)
    runs = members(folder)
    if not runs:
        raise InputError(f"{name}: none of the runs of this sweep is left; remove its folder {folder}")
    return NamedRuns(folder, runs, True)


def members(sweep: Path) -> list[Path]:
    """Return the run folders of the sweep in the folder `sweep` that still exist, in the order of their tasks.

    Raises:
        FileError: sweep.json cannot be used.
        UntrustedError: a folder is another user's, or others can write to it.
    """
    runs = [sweep.parent / run.folder for run in Sweep.read(sweep / SWEEP_FILE, owned=True).runs]
    return [run for run in runs if is_trusted_run(run)]


def remove_empty_sweeps(places: Iterable[Path]) -> list[Path]:
    """Remove the folders of this user's sweeps directly in `places` of which no run is left; return them. A sweep whose
    files cannot be used stays.

    Raises:
        StorageError: a folder cannot be removed.
    """
    removed = []
    for sweep in [sweep for place in dict.fromkeys(places) for sweep in sweeps_in(place)]:
        with contextlib.suppress(InputError):
            runs = Sweep.read(sweep / SWEEP_FILE, owned=True).runs
            if not any(os.path.lexists(sweep.parent / run.folder) for run in runs):
                with storage_errors(sweep):
                    shutil.rmtree(sweep)
                removed.append(sweep)
    return removed


def sweeps_of(folders: Iterable[Path]) -> dict[Path, Path]:
    """Return {run folder: folder of its sweep} for those of `folders` that belong to a sweep. A sweep whose files
    cannot be used has no runs."""
    sweep_of_run: dict[Path, Path] = {}
    for place in sorted({folder.parent for folder in folders}):
        for sweep in sweeps_in(place):
            try:
                runs = Sweep.read(sweep / SWEEP_FILE, owned=True).runs
            except InputError:
                continue
            sweep_of_run |= {sweep.parent / run.folder: sweep for run in runs}
    return {folder: sweep_of_run[folder] for folder in folders if folder in sweep_of_run}
