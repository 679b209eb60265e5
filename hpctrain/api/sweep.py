"""Sweeps: runs that are submitted together, as the tasks of one job array."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.api.arguments import (
    AnyPath,
    Progress,
    check_count,
    check_outside_of_jobs,
    line_reporter,
    overrides_of,
    path_of,
    report_warnings,
)
from hpctrain.api.loaded_run import LoadedRun
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.launch.preflight.prepare import RunInputs
from hpctrain.launch.preflight.stale_topology import stale_topology_text
from hpctrain.launch.queueing import with_site
from hpctrain.launch.sweep import check_sweep, queue_sweep
from hpctrain.launch.sweep_settings import check_runs_differ, check_swept_keys
from hpctrain.records.history.sweep import RUNS_MAX
from hpctrain.runs.sweeps import find_runs
from hpctrain.slurm.commands import Slurm


def submit_sweep(
    run_file: AnyPath, runs: Sequence[Mapping[str, Any]], *, array_limit: int | None = None,
    settings: Mapping[str, Any] | None = None, topology: AnyPath | None = None, plan: AnyPath | None = None,
    site: str | None = None, progress: Progress | None = None,
) -> list[LoadedRun]:  # fmt: skip
    """Submit the runs of a sweep as the tasks of one job array, and return them at once; `wait` waits for one of them.

    `load_sweep` finds them again, by the name of the run file.

    Every run is checked before any is submitted, as by `hpctrain submit --sweep`. A run is named by what it sets.

    Args:
        runs: for each run, its values of keys of the run file: [{"optimizer.lr": 1e-3}, {"optimizer.lr": 3e-4}].
        array_limit: most runs that train at the same time; None: no limit.
        settings: values that replace those of the run file in every run, by key.
        topology: topology file of the nodes; None: each job probes.
        plan: plan file, obeyed to the letter by each run; None: each job plans.
        site: profile of site.yaml; None: the first that matches this cluster.
        progress: called with each line of the checks.

    Raises:
        FileError, InputError: a file or a setting is wrong, two runs set the same values, or there is no Slurm here.
        RefusedError: no partition takes the jobs, they differ in what they ask Slurm for, the model does not fit, or
            this process is inside of a job.
        CommandError: sbatch refused the job array.
        StorageError: a folder cannot be written; no folder of the sweep or its runs is left.
        HpctrainError: the process that builds a run's model failed, or the image cannot be started.
    """
    if not 1 <= len(runs) <= RUNS_MAX:
        raise InputError(f"submit_sweep: runs: found {len(runs)}; allowed: 1 to {RUNS_MAX}")
    check_count("submit_sweep: array_limit", array_limit)
    points = [dict(text.split("=", 1) for text in overrides_of(run)) for run in runs]
    overrides = overrides_of(settings)
    check_swept_keys([list(dict.fromkeys(key for point in points for key in point))], overrides)
    check_runs_differ(points)
    say, runner, clock = line_reporter(progress), SystemRunner(), SystemClock()
    slurm = Slurm(runner)
    given, lines = with_site(RunInputs(Path(run_file), overrides, path_of(topology), path_of(plan)), site, slurm)
    with owner_only():
        say(lines)
        check_outside_of_jobs("submit_sweep")
        sweep = check_sweep(given, points, array_limit, slurm, runner, clock, say)
        report_warnings(progress, stale_topology_text(sweep.prepared[0].topology, None, clock.wall()))
        started = queue_sweep(sweep, slurm, runner, clock, say)
    return [LoadedRun(folder) for folder, _ in started.runs]


def load_sweep(name: AnyPath) -> list[LoadedRun]:
    """Return the runs of a sweep, in the order in which the sweep was submitted; those that were removed are left out.

    Args:
        name: the sweep's folder, or its name, which is that of its run file (of several sweeps the newest is taken).
            Folder and name are looked up where `load_run` looks.

    Raises:
        InputError: there is no such sweep.
        UntrustedError: the folder is another user's, or others can write to it.
        FileError: the sweep's sweep.json is damaged.
    """
    named = find_runs(os.fspath(name), os.environ, Path.cwd())
    if not named.is_sweep:
        raise InputError(f"{named.folder.name}: it is one run and no sweep; load it with load_run")
    return [LoadedRun(folder) for folder in named.runs]
