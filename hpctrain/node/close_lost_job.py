"""`python -m hpctrain.node close`: ends the job of a finished run from another node, because the batch node with the
job script was lost.

The command runs outside any image, on the first node that has ranks in the last generation. It runs only if the batch
node has no ranks in that generation. Without the command the job's nodes would stay allocated until Slurm gives up the
lost node, which takes minutes on most clusters.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from hpctrain.base.clock import Clock, SystemClock
from hpctrain.base.process import Runner, SystemRunner
from hpctrain.jobs.dependencies import refresh_dependent_runs
from hpctrain.node import attempt
from hpctrain.node.exit_markers import is_job_script_alive
from hpctrain.runs.folder import RunFolder, check_trusted
from hpctrain.runs.locate import job_of_process
from hpctrain.slurm.commands import Slurm

SCRIPT_WAIT_S = 5.0
"""Seconds to wait for a sign of the job script, which may still be alive: it checks every second whether the run is
finished."""
POLL_S = 0.25


def main(argv: list[str]) -> int:
    """Complete the attempt's line as the job script would, and cancel the job; do nothing if the job script is alive.
    Return exit code 0.

    Raises:
        InputError: others can write to the run folder.
        CommandError: Slurm does not cancel the job; the job then ends when Slurm gives up the lost node.
    """
    parser = argparse.ArgumentParser(prog="hpctrain.node close")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--again", required=True, help="as of `end`")
    options = parser.parse_args(argv)
    check_trusted(options.folder)
    if not close(options.folder, options.attempt, options.again, SystemRunner(), SystemClock()):
        print("hpctrain node: the job's script is there and ends the job", file=sys.stderr)
    return 0


def close(folder: Path, number: int, again: str, runner: Runner, clock: Clock) -> bool:
    """Complete the attempt's line in attempts.jsonl, cancel the Slurm job in which this process runs, and return True.
    Return False and do neither if the job script is alive or has completed the line already.

    Args:
        folder: the run folder.
        number: number of the attempt.
        again: value of the option `--again` of `hpctrain.node end`.
    """
    deadline = clock.now() + SCRIPT_WAIT_S
    while clock.now() < deadline:
        if is_job_script_alive(folder, number):
            return False
        clock.sleep(POLL_S)
    if number not in {line["attempt"] for line in RunFolder(folder).open_attempts()}:
        return False
    attempt.end(["--folder", str(folder), "--attempt", str(number), "--code", "0", "--again", again])
    slurm = Slurm(runner, os.environ)
    # For Slurm a cancelled job has not succeeded: runs that wait for its success are updated first.
    for line in refresh_dependent_runs(folder, slurm, os.environ):
        print(f"hpctrain node: {line}", file=sys.stderr)
    job = job_of_process(os.environ)
    assert job is not None, "a task runs in a job"
    print(f"hpctrain node: the run is finished and its script lost: job {job} is cancelled", file=sys.stderr)
    slurm.cancel(job)
    return True
