"""`python -m hpctrain.node begin|end`: what the job script does before and after the step, on its first node.

begin prints the attempt's number; end decides whether the job goes back to the queue.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.agent.journal import Journal
from hpctrain.base.clock import SystemClock
from hpctrain.base.process import SystemRunner
from hpctrain.launch.cancel import is_cancelled
from hpctrain.launch.folder import RunFolder
from hpctrain.launch.in_use import check_own_folder
from hpctrain.launch.notify import tell
from hpctrain.launch.training import drop_stale_topology
from hpctrain.launch.trust import check_trusted
from hpctrain.node.ending import (
    Ending,
    Verdict,
    decide_end,
    newest_checkpoint,
    read_ending,
    settle_job,
    stuck_words,
    told_state,
)
from hpctrain.node.run import FINISHED
from hpctrain.records.event import read_events
from hpctrain.records.run import read_run
from hpctrain.slurm.commands import Slurm


def begin(argv: list[str]) -> int:
    """Open a new attempt in the run folder and print its number.

    Raises:
        Refused: the run goes on as another job.
        InputError: others can write to the run folder.
    """
    options = _parse("begin", argv)
    folder = RunFolder(options.folder)
    # Before the step starts: each of its tasks unpickles what submitit left in the folder.
    check_trusted(folder.path)
    check_own_folder(folder.path, os.environ.get("SLURM_JOB_ID"), Slurm(SystemRunner()))
    nodes = [str(name) for name in NodeSet(os.environ.get("SLURM_JOB_NODELIST", ""))]
    now = time.time()
    (folder.path / FINISHED).unlink(missing_ok=True)
    folder.close_open_attempts(now, "ended without a word: node lost, killed, or time limit")
    number = folder.begin_attempt(
        nodes,
        now,
        os.environ.get("SLURM_JOB_ID"),
        int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        checkpoint=newest_checkpoint(folder.path),
    )
    drop_stale_topology(folder, nodes, now)
    tell(folder.path, number, "started", f"attempt {number} on {len(nodes)} nodes", _me(), SystemClock(), os.environ)
    print(number)
    return 0


def end(argv: list[str]) -> int:
    """Close the attempt; put the job back into the queue when it is to go on. The exit code of the job comes back."""
    options = _parse("end", argv)
    folder = RunFolder(options.folder)
    events = [event for event in read_events(folder.path / "events.jsonl") if event.attempt == options.attempt]
    ending = read_ending(options.code, events, (folder.path / FINISHED).exists())

    said: list[str] = []

    def told(verdict: Verdict) -> None:
        reason = verdict.reason if verdict.requeue or verdict.failed else ending.reason or verdict.reason
        folder.end_attempt(options.attempt, time.time(), reason, ending.code)
        state = told_state(ending, verdict)
        if state not in said:  # a controller that is away is asked again, nobody else is told again
            said.append(state)
            tell(folder.path, options.attempt, state, reason, _me(), SystemClock(), os.environ)

    verdict = _settle(folder, ending, told) if options.requeue else _settle_here(ending)
    if not verdict.requeue:
        told(verdict)
    if verdict.failed:
        journal = Journal(folder.path / "events.jsonl", _me(), options.attempt, SystemClock())
        # In somebody's allocation a run that saved and left is no failure: nothing was to bring it back.
        journal.write("failed", -1, verdict.reason, **({} if options.requeue else {"cancelled": True}))
    return ending.code


def _settle(folder: RunFolder, ending: Ending, told: Callable[[Verdict], None]) -> Verdict:
    """The verdict on a job that was submitted for this run."""
    job_id = os.environ["SLURM_JOB_ID"]
    stuck = stuck_words(folder, job_id, read_run(folder.path / "run.yaml").recovery.retries)
    slurm, again = Slurm(SystemRunner()), f"; go on with `hpctrain resubmit {folder.path.name}`"
    verdict = settle_job(ending, job_id, slurm, SystemClock(), lambda: is_cancelled(folder.path), stuck, told)
    return replace(verdict, reason=verdict.reason + again) if verdict.failed else verdict


def _settle_here(ending: Ending) -> Verdict:
    """The verdict on a run inside an allocation that a person has: nothing there is hpctrain's to requeue."""
    if ending.code == 0 or not ending.resumable:
        return decide_end(ending, None)
    reason = "stopped on request, saved" if ending.saved else ending.reason or "stopped on request"
    return Verdict(False, f"{reason}; `hpctrain resubmit` goes on with it", failed=True)


def _me() -> str:
    return os.environ.get("SLURMD_NODENAME", "batch")


def _parse(verb: str, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"hpctrain.node {verb}")
    parser.add_argument("--folder", type=Path, required=True)
    if verb == "end":
        parser.add_argument("--attempt", type=int, required=True)
        parser.add_argument("--code", type=int, required=True)
        parser.add_argument("--requeue", action="store_true", help="the job is this run's own, and may go back")
    return parser.parse_args(argv)
