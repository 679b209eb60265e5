"""`python -m hpctrain.node begin|end`: what the batch script does before and after the step, on its first node.

begin prints the attempt's number; end decides whether the job goes back to the queue.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.agent.decide import RESUMABLE
from hpctrain.agent.journal import Journal
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError
from hpctrain.base.process import Runner, SystemRunner
from hpctrain.launch.cancel import is_cancelled
from hpctrain.launch.folder import RunFolder
from hpctrain.launch.in_use import check_own_folder
from hpctrain.launch.training import drop_stale_topology
from hpctrain.node.run import FINISHED
from hpctrain.records.event import read_events
from hpctrain.slurm.commands import Slurm


@dataclass(frozen=True)
class Verdict:
    """What happens to the job after its step."""

    requeue: bool
    reason: str


def begin(argv: list[str]) -> int:
    """Open a new attempt in the run folder and print its number.

    Raises:
        Refused: the run goes on as another job.
    """
    options = _parse("begin", argv)
    folder = RunFolder(options.folder)
    check_own_folder(folder.path, os.environ.get("SLURM_JOB_ID"), Slurm(SystemRunner()))
    nodes = [str(name) for name in NodeSet(os.environ.get("SLURM_JOB_NODELIST", ""))]
    now = time.time()
    (folder.path / FINISHED).unlink(missing_ok=True)
    folder.close_open_attempts(now, "ended without a word: node lost, killed, or time limit")
    number = folder.begin_attempt(
        nodes, now, os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    )
    drop_stale_topology(folder, nodes, now)
    print(number)
    return 0


def end(argv: list[str]) -> int:
    """Close the attempt; put the job back into the queue when it is to go on. The exit code of the job comes back."""
    options = _parse("end", argv)
    folder = RunFolder(options.folder)
    state, preempted = _job_facts(os.environ.get("SLURM_JOB_ID"), SystemRunner())
    verdict = decide_end(options.code, "CANCELLED" if is_cancelled(folder.path) else state, preempted)
    last = [event for event in read_events(folder.path / "events.jsonl") if event.attempt == options.attempt]
    said = next((event.reason for event in reversed(last) if event.kind in ("failed", "finished", "preempted")), None)
    reason = verdict.reason if verdict.requeue else said or verdict.reason
    folder.end_attempt(options.attempt, time.time(), reason, options.code)
    if verdict.requeue:
        _requeue(folder, options.attempt, os.environ["SLURM_JOB_ID"], SystemRunner())
    return int(options.code)


def decide_end(code: int, state: str | None, preempted: bool) -> Verdict:
    """Whether the job goes back to the queue.

    Args:
        code: exit code of the step: 0 done, 75 stopped at a checkpoint, else failed.
        state: Slurm's state of the job, None when there is no job or no answer.
        preempted: whether Slurm preempted the job. A job that ends within its grace time is over for Slurm (seen with
            22.05: FAILED, not requeued, although PreemptMode is REQUEUE), so it has to ask for itself here too.
    """
    if code == 0:
        return Verdict(False, "all steps are done")
    if code != RESUMABLE:
        return Verdict(False, f"the step ended with exit code {code}")
    if state is None:
        return Verdict(False, "stopped at a checkpoint on request")
    if state == "CANCELLED":
        return Verdict(False, "cancelled")
    if state != "RUNNING":
        # After a node failure or a requeue by hand the job is in the queue already while its script still ends.
        return Verdict(False, f"Slurm took the job ({state}); it decides whether it comes back")
    why = "preempted" if preempted else "stopped before the time limit"
    return Verdict(True, f"{why}, saved, and back to the queue")


def _job_facts(job_id: str | None, runner: Runner) -> tuple[str | None, bool]:
    """(state, preempted) of the job, as Slurm tells; (None, False) outside a job or without an answer."""
    if job_id is None or "SLURM_JOB_NODELIST" not in os.environ or not os.environ.get("SLURM_JOB_PARTITION"):
        return None, False
    try:
        job = Slurm(runner).job(job_id)
    except CommandError:
        return None, False
    return (job.state.value, job.preempt_s is not None) if job is not None else (None, False)


def _requeue(folder: RunFolder, attempt: int, job_id: str, runner: Runner) -> None:
    journal = Journal(folder.path / "events.jsonl", os.environ.get("SLURMD_NODENAME", "batch"), attempt, SystemClock())
    try:
        Slurm(runner).requeue(job_id)
    except CommandError as error:
        journal.write(
            "failed", -1, f"the job could not be requeued ({error}); go on with `hpctrain resubmit {folder.path.name}`"
        )


def _parse(verb: str, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"hpctrain.node {verb}")
    parser.add_argument("--folder", type=Path, required=True)
    if verb == "end":
        parser.add_argument("--attempt", type=int, required=True)
        parser.add_argument("--code", type=int, required=True)
    return parser.parse_args(argv)
