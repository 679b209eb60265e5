"""`python -m hpctrain.node close`: ends an attempt and its job from another node, because the batch node with the job
script was lost.

The command runs outside any image after a node's task has ended: on the node that `left/<attempt>.closer` names, and
on a node whose task failed, or that watched the lost script, if the shell in which the job script runs each task has
seen no sign of the script for 10 s. Without the command nothing would queue the run's next job, and the job's nodes
would stay allocated until its time limit, although no process of the job runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from pathlib import Path

from hpctrain.base.clock import Clock, SystemClock
from hpctrain.base.errors import CommandError
from hpctrain.base.process import Runner, SystemRunner
from hpctrain.jobs.dependencies import refresh_dependent_runs
from hpctrain.node import attempt
from hpctrain.node.exit_markers import (
    ScriptWatch,
    closer_files,
    closing_node,
    departed_nodes,
    has_returned,
    last_touch,
    name_closer,
    write_departure,
)
from hpctrain.node.run import FINISHED_FILE
from hpctrain.runs.folder import RunFolder, check_trusted
from hpctrain.runs.locate import job_id, job_of_process
from hpctrain.slurm.commands import Slurm

SCRIPT_WAIT_S = 10.0
"""Seconds to wait for a sign of the job script, which may still be alive: it checks every second whether the attempt is
over."""
POLL_S = 0.25
TOUCH_S = 1.0
"""Seconds between two touches of the file that names this node."""
CLOSER_SILENT_S = 30.0
"""Seconds without a touch after which another node replaces the one that ends the attempt."""
JOB_POLL_S = 15.0
"""Seconds between two questions to Slurm whether it has given up the lost nodes, which takes minutes."""


def main(argv: list[str]) -> int:
    """End the attempt as the job script would, and cancel the job; do nothing if the job script is alive. Return exit
    code 0.

    Raises:
        InputError: the run folder belongs to another user, others can write to it, or a file in it has errors.
        CommandError: Slurm does not cancel the job; the job then ends at its time limit.
        StorageError: the run folder cannot be written.
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
    """End the attempt in place of the job script: complete its line in attempts.jsonl, queue the run's next job if one
    follows, cancel the Slurm job in which this process runs, and return True. A job that Slurm put back into the queue
    is not cancelled. If the run's newest job is another one by now, only cancel this job. Return False and do nothing
    if the job script is alive, or if the line is complete already and this node replaces no other one.

    Wait first while nobody is named in `left/<attempt>.closer` and other nodes of the job have not left: they may train
    on, or are dead and Slurm has not given them up yet. Also wait while another node is named and touches the file: it
    cancels the job, and thereby ends this process.

    Args:
        folder: the run folder.
        number: number of the attempt.
        code: exit code of this node's task.
        again: value of the option `--again` of `hpctrain.node end`.

    Raises:
        CommandError: Slurm does not cancel the job.
        FileError, UntrustedError: a file of the run has errors; or it or the run folder is untrusted.
        StorageError: the run folder cannot be written.
    """
    slurm, job, node = Slurm(runner, os.environ), job_of_process(os.environ), os.environ["SLURMD_NODENAME"]
    assert job is not None, "a task runs in a job"
    script = ScriptWatch(folder, number, os.environ.get("HPCTRAIN_BATCH_HOST"))
    if code != 0:
        write_departure(folder, number, node, code)  # an agent that crashed did not
    with _Closer(folder, number, node, clock) as closer:
        deadline = clock.now() + SCRIPT_WAIT_S
        while not (closer.is_this_node() and clock.now() >= deadline):
            if script.is_alive():
                return False
            if closer.is_named() or clock.now() < deadline:
                clock.sleep(POLL_S)
            elif (folder / FINISHED_FILE).exists() or _have_all_left(slurm, job, script, folder, number):
                name_closer(folder, number, node)
            else:
                clock.sleep(JOB_POLL_S)
        requeued = False
        if job_id(folder) == job and (closer.replaces or number in _open_attempts(folder)):
            requeued = attempt.end_attempt(folder, number, code, again)[1]
        elif job_id(folder) == job:
            return False
    # For Slurm a cancelled job has not succeeded: runs that wait for this run's success are updated first.
    for line in refresh_dependent_runs(folder, slurm, os.environ):
        print(f"hpctrain node: {line}", file=sys.stderr)
    if not requeued:
        print(f"hpctrain node: the attempt is over and its script lost: job {job} is cancelled", file=sys.stderr)
        slurm.cancel(job)
    return True


def _open_attempts(folder: Path) -> set[int]:
    return {line["attempt"] for line in RunFolder(folder).open_attempts()}


class _Closer:
    """The node that ends the attempt. In the `with` block, this node touches its file every second if it is named, and
    is named itself if it has seen no touch of the named node for CLOSER_SILENT_S."""

    def __init__(self, folder: Path, attempt: int, node: str, clock: Clock) -> None:
        self._folder, self._attempt, self._node, self._clock = folder, attempt, node, clock
        self._seen: tuple[Path, int | None] | None = None
        self._seen_at = clock.now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._touch, daemon=True)
        self.replaces = False
        """Whether this node has replaced one that was named."""

    def __enter__(self) -> _Closer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def is_named(self) -> bool:
        """Whether a node is named."""
        return bool(closer_files(self._folder, self._attempt))

    def is_this_node(self) -> bool:
        """Whether this node is named. If the named node shows no sign, this one is named in its place."""
        files = closer_files(self._folder, self._attempt)
        if not files or closing_node(self._folder, self._attempt) == self._node:
            self.replaces = len(files) > 1
            return bool(files)
        seen = (files[-1], last_touch(files[-1]))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock.now()
        elif self._clock.now() - self._seen_at > CLOSER_SILENT_S:
            name_closer(self._folder, self._attempt, self._node, len(files))
        return False

    def _touch(self) -> None:
        while not self._over.wait(TOUCH_S):
            with contextlib.suppress(OSError):
                files = closer_files(self._folder, self._attempt)
                if files and closing_node(self._folder, self._attempt) == self._node:
                    files[-1].touch()


def _have_all_left(slurm: Slurm, job: str, script: ScriptWatch, folder: Path, number: int) -> bool:
    """Whether all nodes of the job have left the attempt, except a batch node that was lost. False if Slurm does not
    answer."""
    departed = set(departed_nodes(folder, number))
    if script.batch_host is not None and not has_returned(folder, number):
        departed.add(script.batch_host)
    try:
        info = slurm.job(job)
    except CommandError as error:
        print(f"hpctrain node: {error}", file=sys.stderr)
        return False
    return info is not None and set(info.nodes) <= departed
