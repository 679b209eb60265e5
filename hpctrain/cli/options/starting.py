"""Options of the commands that start a run: `--profile STEP`, `--seeds 0-4` and `--own-job`.

With `--own-job`, `submit` or `resubmit` is the last command of a batch script, which becomes the run's job.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import NoReturn

import click

from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import warn
from hpctrain.cli.run_history import add_to_history
from hpctrain.jobs.dependencies import refresh_dependent_runs
from hpctrain.launch.slurm_job.existing_job import adopt_job, current_batch_job_id, is_requeued_job
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.folder import check_trusted
from hpctrain.runs.locate import job_id, run_of_job, scan_runs, untrusted_folders_text
from hpctrain.slurm.commands import Slurm

profile_option = click.option(
    "--profile", "profile", type=click.IntRange(min=1), metavar="STEP",
    help="Record this step with torch's profiler: one trace a rank, in profile/ of the run folder.",
)  # fmt: skip


def with_profile(overrides: tuple[str, ...], step: int | None) -> tuple[str, ...]:
    """Return the overrides of the run file with `profile.step` set to `step`; unchanged if `step` is None."""
    return overrides if step is None else (*overrides, f"profile.step={step}")


def traces_line(run: Run, folder: Path) -> str | None:
    """Return a line that names the traces and what opens them; None if the run traces no step."""
    step = run.profile.step
    if step is None:
        return None
    pattern = f"step-{step}.rank-*.json.gz"
    count = len(list((folder / "profile").glob(pattern)))
    if not count:
        return f"profile: step {step} was not reached, or no trace could be written (the workers' logs say why)"
    what = "1 trace" if count == 1 else f"{count} traces"
    return (
        f"profile: {what} of step {step}: {folder}/profile/{pattern}; open them at ui.perfetto.dev or chrome://tracing"
    )


MOST = 200
NAME_LENGTH = 64
"""Longest name of a run, in characters, as the run file's `name` allows."""

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?:/([1-9]\d{0,8}))?)?", re.ASCII)

seeds_option = click.option("--seeds", metavar="SET", help="One run for each of these seeds: 0-4, or 1,2,5, or 0-20/5.")


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that a text names: '0-2,7' -> [0, 1, 2, 7].

    Raises:
        InputError: the text is wrong, or names too many seeds.
    """
    matches = [_RANGE.fullmatch(item.strip()) for item in text.split(",")]
    # Count the seeds of ranges before any list is made: a range costs nothing, however long it is.
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1, int(m[3] or 1)) for m in matches if m]
    if len(ranges) < len(matches) or not all(ranges):
        raise InputError(f"--seeds: found {text!r}; allowed: numbers and ranges, as 0-4 or 1,2,5 or 0-20/5")
    if sum(len(item) for item in ranges) > MOST:
        raise InputError(f"--seeds: found {text!r}; allowed: up to {MOST} seeds, each is a job of its own")
    return sorted({seed for item in ranges for seed in item})


def with_seed(run: Run, seed: int) -> Run:
    """Return the run with another seed, which is also appended to its name.

    Raises:
        InputError: the name becomes too long.
    """
    name = f"{run.name}-seed{seed}"
    if len(name) > NAME_LENGTH:
        raise InputError(f"--seeds: {name} is longer than {NAME_LENGTH} characters; give the run a shorter name")
    return run.model_copy(update={"name": name, "seed": seed})


own_job_option = click.option(
    "--own-job", is_flag=True, help="In a batch script: this job is the run's own, and goes back to the queue with it."
)


def begin_own_job() -> str:
    """Return the id of this batch job, and ignore SIGTERM from now on: the job script handles the notice of a
    preemption.

    If this process ended by that notice, within the grace time, Slurm would count the job as over.

    Raises:
        InputError: this process is in no batch job.
    """
    job = current_batch_job_id(os.environ)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return job


def earlier_run(job: str) -> Path | None:
    """Return the folder of the run that this job had before it was requeued; None at the job's first start."""
    if not is_requeued_job(os.environ):
        return None
    folder = run_of_job(job, os.environ, Path.cwd())
    others = scan_runs(os.environ, Path.cwd()).untrusted if folder is None else []
    if others:
        warn([f"job {job} came back and no run folder had it; {untrusted_folders_text(others)}"])
    return folder


def become_job(folder: Path, job: str, run: Run | None = None) -> NoReturn:
    """Replace this process by the run's job script, which from then on owns the run folder."""
    folder = folder.resolve()
    check_trusted(folder)
    is_new = job_id(folder) != job
    argv = adopt_job(folder, run or run_of(folder), job)
    if is_new:
        slurm = Slurm(SystemRunner())
        add_to_history("submit", folder, job, slurm)
        warn(refresh_dependent_runs(folder, slurm, os.environ))
    warn([f"job {job}, run folder {folder}"])
    SystemRunner().replace_process(argv, os.environ)
