"""Makes the text of the script of a job array, whose tasks are the runs of a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpctrain import __version__
from hpctrain.base.errors import RefusedError
from hpctrain.base.package_data import package_data_path, render_template
from hpctrain.launch.slurm_job.job_script import directive_path, directives
from hpctrain.records.run.run import Run

TASK_LOGS = "logs"
"""Folder in a sweep's folder with a link for each task, named by the task's number, to the folder of its run's logs.
Slurm makes the name of a task's log from the task's number, and does not know the runs."""


def render_array(name: str, jobs: Sequence[Run], folders: Sequence[Path], sweep: Path, limit: int | None) -> str:
    """Return the text of the script of a job array that starts the job script of each run.

    Args:
        name: name of the sweep.
        jobs: the runs, with job ids in `cluster.after`.
        folders: their run folders, absolute, in the same order.
        sweep: folder of the sweep, absolute.
        limit: most tasks that run at the same time; None: no limit.

    Raises:
        RefusedError: two runs ask Slurm for different jobs.
        InputError: cluster.sbatch holds what cannot go into the script.
    """
    _check_alike(jobs)
    tasks = f"0-{len(jobs) - 1}" + (f"%{limit}" if limit is not None else "")
    alike = [option for option in directives(jobs[0], sweep) if not option.startswith(_OWN)]
    output = f"--output={directive_path(sweep)}/{TASK_LOGS}/%a/%A_%a.job.log"
    return render_template(
        package_data_path("slurm", "array.sbatch.j2"),
        name=name,
        version=__version__,
        directives=[f"--array={tasks}", f"--job-name={name}", output, *alike],
        folders=[shlex.quote(str(folder)) for folder in folders],
    )


_OWN = ("--job-name=", "--output=")
"""Options that differ from run to run; the array has its own values of them."""


def _check_alike(jobs: Sequence[Run]) -> None:
    first = jobs[0]
    options = set(directives(first, Path("/")))
    for job in jobs[1:]:
        others = {option for option in options ^ set(directives(job, Path("/"))) if not option.startswith(_OWN)}
        if others:
            raise RefusedError(
                f"--sweep: {job.name} needs another job than {first.name} ({', '.join(sorted(others))}), and all tasks "
                "of a job array are alike; submit a sweep for each"
            )
