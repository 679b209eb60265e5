"""`python -m hpctrain.node close`: ends an attempt and its job from another node, because the batch node with the job
script was lost.

The command runs outside any image after a node's task has ended: on the node that `left/<attempt>.closer` names, and
on a node whose task failed, if the shell around this task has seen no sign of the script for 10 s. Without the command
nothing would queue the run's next job, and the job's nodes would stay allocated until its time limit, although no
process of the job runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection
from pathlib import Path

from hpctrain.base.clock import Clock, SystemClock
from hpctrain.base.errors import CommandError
from hpctrain.base.process import Runner, SystemRunner
from hpctrain.jobs.dependencies import refresh_dependent_runs
from hpctrain.node import attempt
from hpctrain.node.exit_markers import ScriptWatch, closing_node, departed_nodes, name_closer, write_departure
from hpctrain.runs.folder import RunFolder, check_trusted
from hpctrain.runs.locate import job_of_process
from hpctrain.slurm.commands import Slurm

SCRIPT_WAIT_S = 10.0
"""Seconds to wait for a sign of the job script, which may still be alive: it checks every second whether the attempt is
over."""
POLL_S = 0.25
JOB_POLL_S = 15.0
"""Seconds between two questions to Slurm whether it has given up the lost nodes, which takes minutes."""


def main(argv: list[str]) -> int:
    """End the attempt as the job script would, and cancel the job; do nothing if the job script is alive. Return exit
    code 0.

    Raises:
        InputError: others can write to the run folder.
        CommandError: Slurm does not cancel the job; the job then ends at its time limit.
    """
    parser = argparse.ArgumentParser(prog="hpctrain.node close")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--code", type=int, required=True, help="exit code of this node's task")
    parser.add_argument("--again", required=True, help="as of `end`")
    options = parser.parse_args(argv)
    check_trusted(options.folder)
    if not close(options.folder, options.attempt, options.code, options.again, SystemRunner(), SystemClock()):
        print("hpctrain node: the job's script is there and ends the job", file=sys.stderr)
    return 0


def close(folder: Path, number: int, code: int, again: str, runner: Runner, clock: Clock) -> bool:
    """End the attempt: complete its line in attempts.jsonl, queue the run's next job if one follows, cancel the Slurm
    job in which this process runs, and return True. Return False and do nothing if the job script is alive, if another
    node ends the attempt, or if its line is complete already. A job that Slurm put back into the queue is not
    cancelled.

    Wait first while nobody is named in `left/<attempt>.closer` and other nodes of the job have not left: they may train
    on, or are dead and Slurm has not given them up yet.

    Args:
        folder: the run folder.
        number: number of the attempt.
        code: exit code of this node's task.
        again: value of the option `--again` of `hpctrain.node end`.
    """
    slurm, job, node = Slurm(runner, os.environ), job_of_process(os.environ), os.environ["SLURMD_NODENAME"]
    assert job is not None, "a task runs in a job"
    script = ScriptWatch(folder, number, os.environ.get("HPCTRAIN_BATCH_HOST"))
    if code != 0:
        write_departure(folder, number, node, code)  # an agent that crashed did not
    deadline = clock.now() + SCRIPT_WAIT_S
    while not script.is_alive() and (closer := closing_node(folder, number)) in (None, node):
        if clock.now() < deadline:
            clock.sleep(POLL_S)
        elif closer == node:
            break
        elif _have_all_left(slurm, job, {script.batch_host, *departed_nodes(folder, number)}):
            name_closer(folder, number, node)
        else:
            clock.sleep(JOB_POLL_S)
    else:
        return False
    if number not in {line["attempt"] for line in RunFolder(folder).open_attempts()}:
        return False
    requeued = attempt.end_attempt(folder, number, code, again)[1]
    # For Slurm a cancelled job has not succeeded: runs that wait for this run's success are updated first.
    for line in refresh_dependent_runs(folder, slurm, os.environ):
        print(f"hpctrain node: {line}", file=sys.stderr)
    if not requeued:
        print(f"hpctrain node: the attempt is over and its script lost: job {job} is cancelled", file=sys.stderr)
        slurm.cancel(job)
    return True


def _have_all_left(slurm: Slurm, job: str, departed: Collection[str | None]) -> bool:
    """Whether no other nodes than these are of the job. False if Slurm does not answer."""
    try:
        info = slurm.job(job)
    except CommandError as error:
        print(f"hpctrain node: {error}", file=sys.stderr)
        return False
    return info is not None and set(info.nodes) <= set(departed)
