"""Why an attempt was asked to stop, and the words for it: only what is true of the job's limit, or of a preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_slurm import FakeSlurm

from hpctrain.jobs.attempt_outcome import AttemptOutcome, read_outcome, stop_cause, stop_reason_text
from hpctrain.records.history.run_log import Event, EventKind
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo

NOTICE_S = 120


def job(**changes: object) -> JobInfo:
    fake = FakeSlurm()
    found = Slurm(fake).job(fake.submit("--nodes=2", "--time=60"))
    assert found is not None
    return replace(found, **changes)  # type: ignore[arg-type]


LIMIT_S = job().end_s or 0.0
EARLY, LATE = LIMIT_S - 1800.0, LIMIT_S - 100.0


def outcome(asked_by: str | None, saved: bool = True) -> AttemptOutcome:
    return AttemptOutcome(75, "resumable", saved, asked_by, f"asked to stop by {asked_by}; a checkpoint is saved first")


@pytest.mark.parametrize(
    ("asked_by", "info", "now", "cause", "words"),
    [
        ("SIGUSR2", job(), LATE, "time_limit", "stopped before the time limit, saved"),
        # sbatch(1): the notice may come a minute earlier than asked for.
        ("SIGUSR2", job(), LIMIT_S - NOTICE_S - 59, "time_limit", "stopped before the time limit, saved"),
        ("SIGUSR2", job(preempt_s=1.0), LATE, "preempted", "preempted, saved"),
        ("SIGTERM", job(preempt_s=1.0), EARLY, "preempted", "preempted, saved"),
        ("SIGTERM", job(state="TIMEOUT"), LIMIT_S, "time_limit", "stopped before the time limit, saved"),
        ("SIGTERM", job(), EARLY, "signal", "stopped by SIGTERM, sent by neither a preemption nor the time limit"),
        # By hand although the limit is near: the notice is another signal.
        ("SIGTERM", job(), LATE, "signal", "stopped by SIGTERM, sent by neither a preemption nor the time limit"),
        ("SIGUSR2", job(), EARLY, "signal", "stopped by SIGUSR2, sent by neither a preemption nor the time limit"),
        ("SIGUSR2", job(end_s=None), LATE, "signal", "stopped by SIGUSR2, sent by neither"),
        (None, job(), EARLY, None, "asked to stop by None"),
        # Slurm ends the job for a requeue by hand, and sent the signal; or it cannot be asked.
        ("SIGTERM", job(state="PENDING"), EARLY, None, "asked to stop by SIGTERM"),
        ("SIGTERM", job(state="COMPLETING"), EARLY, None, "asked to stop by SIGTERM"),
        ("SIGUSR2", None, LATE, None, "asked to stop by SIGUSR2"),
    ],
)
def test_a_stop_is_called_by_its_cause(
    asked_by: str | None, info: JobInfo | None, now: float, cause: str | None, words: str
) -> None:
    asked = outcome(asked_by)
    assert stop_cause(asked, info, now, NOTICE_S) == cause
    assert stop_reason_text(asked, stop_cause(asked, info, now, NOTICE_S)).startswith(words)


def test_only_what_was_asked_to_stop_was_stopped() -> None:
    failed = AttemptOutcome(1, "fatal", reason="the loss is nan")
    assert stop_cause(failed, job(), LATE, NOTICE_S) is None
    assert stop_reason_text(failed, None) == "the loss is nan"
    assert stop_reason_text(AttemptOutcome(137, "fatal"), None) == "the step ended with exit code 137"


def event(kind: EventKind, generation: int = 0, **data: object) -> Event:
    return Event(time_s=0, attempt=0, generation=generation, node="gpu1", kind=kind, reason=kind, data=data)


@pytest.mark.parametrize(
    ("code", "events", "saved"),
    [
        (75, [event("preempted", asked_by="SIGTERM")], True),
        (137, [event("preempted", asked_by="SIGTERM"), event("checkpoint_saved")], True),
        # Killed before the checkpoint was there; the one before the request does not count.
        (137, [event("checkpoint_saved"), event("preempted", asked_by="SIGTERM")], False),
        (75, [event("preempted", -1, asked_by="SIGTERM")], False),
    ],
)
def test_saved_is_what_was_saved(code: int, events: list[Event], saved: bool) -> None:
    found = read_outcome(code, events, False)
    assert (found.saved, found.asked_by) == (saved, "SIGTERM")
    assert stop_reason_text(found, "time_limit").endswith(", saved" if saved else ", without a newer checkpoint")


def test_a_stop_before_the_handlers_stood_is_known_by_the_exit_code() -> None:
    assert read_outcome(143, [], False).asked_by == "SIGTERM"
    assert read_outcome(140, [], False).asked_by == "SIGUSR2"
