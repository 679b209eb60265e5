"""The class of an outcome: the agents' words first, then Slurm's, then what the ledger says of the attempts before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_slurm import FakeSlurm

from hpctrain.jobs.attempt_outcome import AttemptOutcome, read_outcome, with_slurm_state
from hpctrain.records.history.ledger import attempts_without_checkpoint, failures_since_checkpoint, retries_spent_text
from hpctrain.records.history.run_log import Event, EventKind
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo


def event(kind: EventKind, **data: object) -> Event:
    return Event(time_s=0, attempt=0, generation=0, node="gpu1", kind=kind, reason=kind, data=data)


STARTED = event("attempt_started", nodes=["gpu1", "gpu2"])


@pytest.mark.parametrize(
    ("code", "events", "finished", "expected"),
    [
        (0, [], False, "done"),
        # The majority finished: neither the isolated node's 75 nor an agent out of memory makes it another end.
        (75, [event("failed", exit_code=75), event("finished")], True, "done"),
        (75, [event("finished"), event("failed", exit_code=75)], False, "done"),
        (137, [], True, "done"),
        (None, [event("finished")], False, "done"),
        (75, [], False, "resumable"),
        # An agent was killed earlier, the others saved before the time limit.
        (137, [event("preempted")], False, "resumable"),
        (None, [event("preempted")], False, "resumable"),
        # Told to leave before the handlers stood.
        (143, [], False, "resumable"),
        (140, [], False, "resumable"),
        # Too few nodes are left, and the one that was lost counts as killed.
        (137, [event("failed", exit_code=75)], False, "infrastructure"),
        # No plan for those that are left; the next job gets all of them.
        (4, [STARTED, event("failed", exit_code=4, left=["gpu1"])], False, "infrastructure"),
        (None, [], False, "infrastructure"),
        (4, [STARTED, event("failed", exit_code=4, left=["gpu1", "gpu2"])], False, "fatal"),
        # All are there, and the verdict keeps one out of every plan: others would do.
        (
            4,
            [STARTED, event("probed", exclude=["gpu2"]), event("failed", exit_code=4, left=["gpu1", "gpu2"])],
            False,
            "infrastructure",
        ),
        (137, [], False, "fatal"),
        (4, [], False, "fatal"),
        (1, [event("failed", exit_code=1)], False, "fatal"),
        (75, [event("failed", exit_code=1), event("failed", exit_code=75)], False, "fatal"),
        (1, [event("preempted"), event("failed", exit_code=1)], False, "fatal"),
        (77, [event("worker_died"), event("failed", exit_code=77)], False, "no_progress"),
        (77, [event("worker_hung"), event("failed", exit_code=77)], False, "no_progress"),
        # Other nodes would not find lost checkpoints either.
        (
            4,
            [
                event("attempt_started", nodes=["gpu1", "gpu2"]),
                event("checkpoints_lost"),
                event("failed", exit_code=4, left=["gpu1"]),
            ],
            False,
            "fatal",
        ),
        # No worker failed by itself: all of them lost their peers, again and again.
        (77, [event("failed", exit_code=77)], False, "infrastructure"),
        # A worker's own error: whose fault it is decides.
        (76, [event("failed", exit_code=76, fault="gpu_memory_error")], False, "infrastructure"),
        (76, [event("failed", exit_code=76, fault="open_files")], False, "infrastructure"),
        (1, [event("failed", exit_code=1, fault="illegal_access")], False, "fatal"),
        (1, [event("failed", exit_code=1, fault="no such row")], False, "fatal"),
        # What one node's hardware did may end a worker of another one as an error of the program.
        (
            76,
            [event("failed", exit_code=76, fault="gpu_lost"), event("failed", exit_code=1, fault="exception")],
            False,
            "infrastructure",
        ),
    ],
)
def test_the_events_say_more_than_the_highest_exit_code(
    code: int | None, events: list[Event], finished: bool, expected: str
) -> None:
    outcome = read_outcome(code, events, finished)
    assert outcome.exit_class == expected
    assert (outcome.code == 0) == (expected == "done")


@pytest.mark.parametrize(
    ("code", "last", "reason"),
    [
        (1, [], "agent_crashed"),
        (75, [event("failed", exit_code=75)], "agent_crashed; then failed"),
        # What else ended the attempt is not told by an agent that had crashed long before.
        (1, [event("failed", exit_code=1)], "failed"),
        (75, [event("preempted")], "preempted"),
    ],
)
def test_an_agent_that_crashed_is_the_reason_where_nothing_else_is(code: int, last: list[Event], reason: str) -> None:
    assert read_outcome(code, [STARTED, event("agent_crashed", node="gpu1"), *last], False).reason == reason


def test_slurm_knows_more_of_a_lost_node_than_an_agent_that_crashed_for_it() -> None:
    outcome = read_outcome(1, [STARTED, event("agent_crashed", node="gpu1")], False)
    assert with_slurm_state(outcome, info("RUNNING")) == outcome
    said = with_slurm_state(outcome, info("NODE_FAIL"))
    assert (said.exit_class, said.reason) == ("infrastructure", "agent_crashed; Slurm ended the job: NODE_FAIL")


def test_what_the_next_attempt_would_meet_again_is_hopeless() -> None:
    assert read_outcome(2, [event("failed", exit_code=2)], False).not_retryable
    assert read_outcome(4, [], False).not_retryable
    assert not read_outcome(1, [event("failed", exit_code=1)], False).not_retryable
    assert not read_outcome(4, [STARTED, event("failed", exit_code=4, left=["gpu1"])], False).not_retryable


def info(state: str, preempted: bool = False) -> JobInfo:
    fake = FakeSlurm()
    job = Slurm(fake).job(fake.submit("--nodes=2"))
    assert job is not None
    return replace(job, state=state, preempt_s=1.0 if preempted else None)


SILENT = AttemptOutcome(None, "infrastructure")


@pytest.mark.parametrize(
    ("outcome", "job", "expected"),
    [
        (SILENT, info("TIMEOUT"), "resumable"),
        (SILENT, info("NODE_FAIL"), "infrastructure"),
        (SILENT, info("OUT_OF_MEMORY"), "fatal"),
        (SILENT, info("PREEMPTED"), "resumable"),
        (SILENT, None, "infrastructure"),
        (SILENT, info("UNKNOWN"), "infrastructure"),
        # srun was killed, the agents said nothing: it was the node.
        (AttemptOutcome(137, "fatal"), info("NODE_FAIL"), "infrastructure"),
        (AttemptOutcome(137, "fatal"), info("RUNNING"), "fatal"),
        # They were there: a bug stays a bug on a node that fails later.
        (AttemptOutcome(1, "fatal", reason="the loss is nan"), info("NODE_FAIL"), "fatal"),
        (AttemptOutcome(1, "fatal", reason="cut off"), info("RUNNING", preempted=True), "resumable"),
        (AttemptOutcome(0, "done"), info("TIMEOUT"), "done"),
    ],
)
def test_slurm_has_the_second_word(outcome: AttemptOutcome, job: JobInfo | None, expected: str) -> None:
    assert with_slurm_state(outcome, job).exit_class == expected


def test_the_ledger_counts_since_the_last_new_checkpoint() -> None:
    def line(kind: str, before: str | None, after: str | None) -> dict[str, object]:
        return {"class": kind, "checkpoint_before": before, "checkpoint_after": after}

    lines = [line("fatal", None, None), line("fatal", None, "a"), line("infrastructure", "a", "a")]
    assert (failures_since_checkpoint(lines), attempts_without_checkpoint(lines)) == (1, 1)
    lines += [line("resumable", "a", "a"), line("no_progress", "a", "a")]
    assert (failures_since_checkpoint(lines), attempts_without_checkpoint(lines)) == (2, 2)
    assert failures_since_checkpoint([*lines, line("resumable", "a", "b")]) == 0
    assert (failures_since_checkpoint([]), attempts_without_checkpoint([])) == (0, 0)


@pytest.mark.parametrize(
    ("failures", "retries", "text"),
    [
        (0, 0, None),
        (3, 3, None),
        (1, 0, "1 failure without a new checkpoint (recovery.retries is 0)"),
        (4, 3, "4 failures in a row without a new checkpoint (recovery.retries is 3)"),
    ],
)
def test_retries_are_spent_by_one_failure_more(failures: int, retries: int, text: str | None) -> None:
    assert retries_spent_text(failures, retries) == text


def test_nodes_that_the_probe_refuses_are_no_failure_of_the_run() -> None:
    events = [STARTED, event("probed", exclude=["gpu2"]), event("failed", exit_code=4, by_probe=True)]
    outcome = read_outcome(4, events, False)
    assert (outcome.code, outcome.exit_class, outcome.not_retryable) == (4, "infrastructure", False)
