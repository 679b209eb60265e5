"""The policy of a job's life: each state with its verdict, and the reason in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from hpctrain.jobs.attempt_outcome import AttemptOutcome
from hpctrain.jobs.policy import (
    AttemptState,
    JobVerdict,
    RunState,
    classify,
    decide_after_attempt,
    decide_before_start,
)
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo

ASKED = "asked to stop by SIGUSR2; a checkpoint is saved first"
STOPPED = AttemptOutcome(75, "resumable", True, "SIGUSR2", ASKED)
FATAL = AttemptOutcome(1, "fatal", reason="the loss is nan")
LOST = AttemptOutcome(75, "infrastructure", reason="1 of 2 nodes is left")
WRONG = AttemptOutcome(2, "fatal", reason="no such corpus", not_retryable=True)
RESUBMIT = "; go on with `hpctrain resubmit gpt`"


def info(state: str, preempted: bool = False, **changes: Any) -> JobInfo:
    fake = FakeSlurm()
    job = Slurm(fake).job(fake.submit("--nodes=2", "--time=60"))
    assert job is not None
    return replace(job, state=state, preempt_s=1.0 if preempted else None, **changes)


RUNNING = info("RUNNING")
LIMIT_S = RUNNING.end_s or 0.0


def state(outcome: AttemptOutcome, job: JobInfo | None, **changes: Any) -> AttemptState:
    """An attempt that left a new checkpoint, of a run with one retry; its job ended near its limit."""
    plain = AttemptState("gpt", outcome, retries=1, notice_s=120, progressed=True, now=LIMIT_S - 100, job=job)
    return replace(plain, **changes)


STUCK: dict[str, Any] = {"progressed": False}
SPENT: dict[str, Any] = {"progressed": False, "failures": 1}
AWAY: dict[str, Any] = {"job": None, "slurm_error": "the Slurm controller is away"}
NO_ANSWER = "; the run could not be queued again (the Slurm controller is away)" + RESUBMIT
TWO_FAILURES = "; 2 failures in a row without a new checkpoint (recovery.retries is 1)"


@pytest.mark.parametrize(
    ("state", "act", "kind", "reason"),
    [
        (state(AttemptOutcome(0, "done", reason="all 10 steps"), RUNNING), "stop", "done", "all 10 steps"),
        (state(AttemptOutcome(0, "done"), None), "stop", "done", "all steps are done"),
        # The run goes on.
        (state(STOPPED, RUNNING), "again", "resumable",
         "stopped before the time limit, saved, and back to the queue"),
        (state(STOPPED, RUNNING, now=LIMIT_S - 1800), "again", "resumable",
         "stopped by SIGUSR2, sent by neither a preemption nor the time limit (scancel --signal, kill), saved, and "
         "back to the queue"),
        (state(STOPPED, info("RUNNING", True)), "again", "resumable", "preempted, saved, and back to the queue"),
        (state(AttemptOutcome(75, "resumable"), RUNNING, now=0.0), "again", "resumable",
         "stopped on request; back to the queue"),
        (state(FATAL, RUNNING), "again", "fatal", "the loss is nan; back to the queue"),
        (state(FATAL, info("TIMEOUT")), "again", "fatal", "the loss is nan; back to the queue"),
        (state(LOST, RUNNING), "again", "infrastructure", "1 of 2 nodes is left; back to the queue"),
        (state(AttemptOutcome(137, "fatal"), RUNNING), "again", "fatal",
         "the step ended with exit code 137; back to the queue"),
        # PreemptMode=CANCEL: Slurm ends the job and does not bring it back.
        (state(STOPPED, info("COMPLETING", True)), "again", "resumable", "preempted, saved, and back to the queue"),
        (state(STOPPED, info("PREEMPTED")), "again", "resumable", "preempted, saved, and back to the queue"),
        (state(AttemptOutcome(137, "fatal"), info("RUNNING", True)), "again", "resumable",
         "preempted, without a newer checkpoint, and back to the queue"),
        # The notice before the time limit was not enough.
        (state(AttemptOutcome(143, "resumable"), info("COMPLETING", reason="TimeLimit")), "again", "resumable",
         "ended at the time limit, and back to the queue"),
        # Slurm goes on with it.
        (state(STOPPED, info("PENDING")), "wait", "resumable",
         ASKED + "; Slurm has put the job back into the queue"),
        (state(STOPPED, info("PENDING", True), successor="9"), "wait", "resumable",
         "preempted, saved; Slurm has put the job back into the queue"),
        (state(STOPPED, info("COMPLETING")), "wait", "resumable",
         ASKED + "; Slurm took the job (COMPLETING) and decides whether it comes back"),
        (state(STOPPED, info("NODE_FAIL"), successor="9"), "wait", "resumable",
         ASKED + "; Slurm took the job (NODE_FAIL); job 9 goes on"),
        # A person ended it.
        (state(STOPPED, info("CANCELLED")), "stop", "resumable", "cancelled"),
        (state(STOPPED, RUNNING, cancelled=True), "stop", "resumable", "cancelled"),
        (state(FATAL, RUNNING, cancelled=True, **SPENT), "stop", "fatal", "cancelled"),
        (state(STOPPED, info("PENDING"), cancelled=True), "stop", "resumable", "cancelled"),
        # The next attempt would fail in the same way, or failed too often.
        (state(WRONG, RUNNING), "stop", "fatal", "no such corpus" + RESUBMIT),
        (state(WRONG, info("RUNNING", True)), "again", "resumable",
         "preempted, without a newer checkpoint, and back to the queue"),
        (state(FATAL, RUNNING, **SPENT), "stop", "fatal", "the loss is nan" + TWO_FAILURES + RESUBMIT),
        (state(FATAL, RUNNING, retries=0), "stop", "fatal",
         "the loss is nan; 1 failure without a new checkpoint (recovery.retries is 0)" + RESUBMIT),
        (state(LOST, RUNNING, **SPENT), "again", "infrastructure", "1 of 2 nodes is left; back to the queue"),
        # A time limit too short for one checkpoint: nothing would ever change.
        (state(STOPPED, RUNNING, **STUCK), "again", "no_progress",
         "stopped before the time limit, saved, and back to the queue"),
        (state(STOPPED, RUNNING, **SPENT), "stop", "no_progress",
         "stopped before the time limit, saved" + TWO_FAILURES + RESUBMIT),
        (state(STOPPED, info("RUNNING", True), **SPENT), "again", "resumable",
         "preempted, saved, and back to the queue"),
        # A cluster that fails again and again gets two attempts.
        (state(LOST, RUNNING, attempts_without_checkpoint=1, **STUCK), "again", "infrastructure",
         "1 of 2 nodes is left; back to the queue"),
        (state(LOST, RUNNING, attempts_without_checkpoint=2, **STUCK), "again", "no_progress",
         "1 of 2 nodes is left; back to the queue"),
        (state(LOST, RUNNING, attempts_without_checkpoint=2, **SPENT), "stop", "no_progress",
         "1 of 2 nodes is left" + TWO_FAILURES + RESUBMIT),
        # Slurm cannot be asked.
        (state(STOPPED, None), "stop", "resumable", ASKED + "; Slurm does not know its job" + RESUBMIT),
        (state(STOPPED, **AWAY), "stop", "resumable", ASKED + NO_ANSWER),
        (state(STOPPED, successor="9", **AWAY), "wait", "resumable", ASKED + "; job 9 goes on"),
        (state(WRONG, successor="9", **AWAY), "stop", "fatal", "no such corpus" + NO_ANSWER),
        (state(FATAL, successor="9", **AWAY, **SPENT), "stop", "fatal", "the loss is nan" + NO_ANSWER),
        # A person's allocation: nothing is queued.
        (state(STOPPED, None, in_allocation=True), "stop", "resumable",
         "stopped on request, saved; `hpctrain resubmit` goes on with it"),
        (state(LOST, None, in_allocation=True), "stop", "infrastructure",
         "1 of 2 nodes is left; `hpctrain resubmit` goes on with it"),
        (state(FATAL, None, in_allocation=True, **SPENT), "stop", "fatal", "the loss is nan"),
    ],
)  # fmt: skip
def test_each_state_of_an_ended_attempt_has_its_verdict(state: AttemptState, act: str, kind: str, reason: str) -> None:
    verdict = decide_after_attempt(state)
    assert (verdict.act, verdict.exit_class, verdict.reason) == (act, kind, reason)
    # Nobody else reports a run that stops before it is done, unless a person stopped it.
    silent = kind == "done" or reason == "cancelled" or (state.in_allocation and kind == "fatal")
    assert verdict.failed == (act == "stop" and not silent)
    assert (verdict.cause == "time_limit") == ("time limit," in reason and "by neither" not in reason)


@pytest.mark.parametrize("job", [RUNNING, info("COMPLETING", True), info("TIMEOUT")])
def test_a_run_that_a_person_cancelled_never_goes_on(job: JobInfo) -> None:
    for outcome in (STOPPED, FATAL, LOST, WRONG):
        assert decide_after_attempt(state(outcome, job, cancelled=True)).act == "stop"


def test_an_attempt_whose_script_was_killed_is_explained_by_slurm() -> None:
    silent = AttemptOutcome(None, "infrastructure")
    assert classify(state(silent, None)).reason == "ended without a word: node lost, killed, or time limit"
    end = classify(state(silent, info("TIMEOUT"), **STUCK))
    assert (end.exit_class, end.reason, end.cause) == ("no_progress", "ended at the time limit", "time_limit")
    assert classify(state(silent, info("OUT_OF_MEMORY"))).reason == "Slurm ended the job: OUT_OF_MEMORY"


RUN = RunState("gpt", retries=1, last_reason="the loss is nan")


@pytest.mark.parametrize(
    ("state", "kind", "failed", "reason"),
    [
        (replace(RUN, finished=True, cancelled=True), "done", False, "gpt: the run is finished"),
        (replace(RUN, cancelled=True), "resumable", False,
         "gpt: the run was cancelled; `hpctrain resubmit gpt` goes on with it"),
        (replace(RUN, cancelled_job="7", failures=9), "resumable", False,
         "gpt: its job 7 was cancelled; `hpctrain resubmit gpt` goes on with it"),
        (replace(RUN, failures=2, lost_checkpoints="all are lost"), "fatal", True,
         "the loss is nan; 2 failures in a row without a new checkpoint (recovery.retries is 1); `hpctrain resubmit "
         "gpt` goes on with it"),
        (replace(RUN, failures=1, lost_checkpoints="all are lost"), "fatal", True, "gpt: all are lost"),
    ],
)  # fmt: skip
def test_each_reason_not_to_begin_has_its_verdict(state: RunState, kind: str, failed: bool, reason: str) -> None:
    verdict = decide_before_start(state)
    assert verdict is not None
    assert (verdict.act, verdict.exit_class, verdict.failed, verdict.reason) == ("stop", kind, failed, reason)


def test_a_run_with_retries_begins() -> None:
    assert decide_before_start(replace(RUN, failures=1)) is None


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        (JobVerdict("stop", "all steps are done", "done"), "done"),
        (JobVerdict("again", "preempted, saved, and back to the queue", "resumable"), "requeued"),
        (JobVerdict("wait", "Slurm took the job (REQUEUED)", "resumable"), "requeued"),
        (JobVerdict("stop", "cancelled", "resumable", cancelled=True), "cancelled"),
        (JobVerdict("stop", "the job could not be requeued", "resumable", failed=True), "failed"),
        (JobVerdict("stop", "a worker ended", "fatal", failed=True), "failed"),
    ],
)
def test_the_end_of_an_attempt_has_one_name_towards_the_outside(verdict: JobVerdict, state: str) -> None:
    assert verdict.notify_state == state
