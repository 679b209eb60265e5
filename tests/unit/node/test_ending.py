"""The end of an attempt: what the exit code of srun means, and how the job gets back into the queue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_clock import FakeClock
from fake_slurm import FakeSlurm

from hpctrain.base.errors import CommandError
from hpctrain.base.process import Finished
from hpctrain.launch.folder import RunFolder
from hpctrain.node import attempt, run
from hpctrain.node.ending import Ending, Verdict, decide_end, read_ending, settle_job, stuck_words, told_state
from hpctrain.records.event import Event, EventKind
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo, JobState

RUN = """
name: gpt
steps: 10
cluster: {kind: slurm, nodes: 2}
model: {preset: tiny-1m}
data: {train: [/data]}
batch: {global: 8}
recovery: {retries: 2}
"""
STOPPED = Ending(75, True, True, "asked to stop; a checkpoint is saved first")


def event(kind: EventKind, reason: str = "", **data: object) -> Event:
    return Event(time_s=0, attempt=0, generation=0, node="gpu1", kind=kind, reason=reason, data=data)


@pytest.mark.parametrize(
    ("code", "events", "finished", "expected", "resumable"),
    [
        (0, [], False, 0, False),
        # The majority finished: neither the isolated node's 75 nor an agent out of memory makes it another end.
        (75, [event("failed", exit_code=75), event("finished")], True, 0, False),
        (75, [event("finished"), event("failed", exit_code=75)], False, 0, False),
        (137, [], True, 0, False),
        (75, [], False, 75, True),
        # An agent was killed earlier, the others saved before the time limit.
        (137, [event("preempted")], False, 137, True),
        # Too few nodes are left, and the one that was lost counts as killed.
        (137, [event("failed", exit_code=75)], False, 137, True),
        # Told to leave before the handlers stood.
        (143, [], False, 143, True),
        (140, [], False, 140, True),
        (137, [], False, 137, False),
        (1, [event("failed", exit_code=1)], False, 1, False),
        (75, [event("failed", exit_code=1), event("failed", exit_code=75)], False, 75, False),
        (1, [event("preempted"), event("failed", exit_code=1)], False, 1, False),
        (4, [], False, 4, False),
    ],
)
def test_the_events_say_more_than_the_highest_exit_code(
    code: int, events: list[Event], finished: bool, expected: int, resumable: bool
) -> None:
    ending = read_ending(code, events, finished)
    assert (ending.code, ending.resumable) == (expected, resumable)


def info(state: str, preempted: bool = False) -> JobInfo:
    fake = FakeSlurm()
    job = Slurm(fake).job(fake.submit("--nodes=2"))
    assert job is not None
    return replace(job, state=JobState(state), preempt_s=1.0 if preempted else None)


@pytest.mark.parametrize(
    ("ending", "job", "requeue"),
    [
        (Ending(0, False, False, None), info("RUNNING"), False),
        (STOPPED, info("RUNNING"), True),
        (STOPPED, info("RUNNING", True), True),
        (STOPPED, info("CANCELLED"), False),
        (STOPPED, None, False),
        (STOPPED, info("PENDING"), False),
        (STOPPED, info("PENDING", True), False),
        (STOPPED, info("COMPLETING"), False),
        # PreemptMode=CANCEL: Slurm ends the job and does not bring it back.
        (STOPPED, info("COMPLETING", True), True),
        (STOPPED, info("PREEMPTED", True), True),
        (Ending(1, False, False, None), info("RUNNING"), False),
        (Ending(137, False, False, None), info("RUNNING", True), True),
    ],
)
def test_what_can_go_on_goes_back_to_the_queue(ending: Ending, job: JobInfo | None, requeue: bool) -> None:
    assert decide_end(ending, job).requeue is requeue
    assert not decide_end(ending, job, cancelled=True).requeue


def test_a_job_that_only_loops_is_stopped_but_not_for_a_preemption() -> None:
    assert decide_end(STOPPED, info("RUNNING"), stuck="it loops") == Verdict(False, "it loops", failed=True)
    assert decide_end(STOPPED, info("RUNNING", True), stuck="it loops").requeue


def settle(fake: FakeSlurm, job: str, clock: FakeClock, told: list[Verdict]) -> Verdict:
    return settle_job(STOPPED, job, Slurm(fake), clock, lambda: False, None, told.append)


def test_a_controller_that_is_away_at_the_end_is_asked_again() -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=2")
    fake.away = True
    clock = FakeClock(on_sleep=lambda _: setattr(fake, "away", clock.now() < 20))
    told: list[Verdict] = []
    assert settle(fake, job, clock, told).requeue
    assert fake.jobs[int(job)].restarts == 1
    assert [verdict.reason for verdict in told] == ["stopped before the time limit, saved, and back to the queue"]


def test_a_controller_that_stays_away_is_no_silent_end() -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=2")
    fake.away = True
    clock = FakeClock()
    verdict = settle(fake, job, clock, [])
    assert verdict.failed
    assert "could not be requeued (the Slurm controller is away" in verdict.reason
    assert 60 <= clock.now() < 70


class Deaf(FakeSlurm):
    """Takes the requeue, and is away before it answers."""

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> Finished:
        done = super().run(argv, timeout_s, env)
        return Finished(done.argv, 1, "", "Socket timed out on send/recv\n") if argv[1] == "requeue" else done


def test_a_requeue_whose_answer_is_lost_is_not_asked_twice() -> None:
    fake = Deaf()
    fake.submit("--nodes=3", "--hold")
    job = fake.submit("--nodes=2")
    assert settle(fake, job, FakeClock(), []).requeue
    assert sum(argv[1] == "requeue" for argv in fake.argvs) == 1


def test_a_requeue_that_slurm_refuses_is_told() -> None:
    class Refusing(FakeSlurm):
        def _requeue(self, job: object) -> None:
            raise CommandError("scontrol requeue 1: Access/permission denied")

    fake = Refusing()
    verdict = settle(fake, fake.submit("--nodes=2"), FakeClock(), [])
    assert verdict.failed
    assert "permission denied" in verdict.reason


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "checkpoints").mkdir()
    return RunFolder(tmp_path)


def test_attempts_without_a_new_checkpoint_are_counted(folder: RunFolder) -> None:
    for _ in range(3):
        folder.begin_attempt(["gpu1"], 0.0, "7", checkpoint=None)
    assert stuck_words(folder, "7", retries=3) is None
    words = stuck_words(folder, "7", retries=2)
    assert words is not None
    assert words.startswith("3 attempts in a row ended without a new checkpoint (recovery.retries is 2)")
    # A resubmitted run starts its count anew, and a checkpoint ends it.
    assert stuck_words(folder, "8", retries=2) is None
    (folder.path / "checkpoints" / "step-00000010").mkdir()
    assert stuck_words(folder, "7", retries=2) is None


def last_event(folder: RunFolder) -> dict[str, object]:
    return json.loads((folder.path / "events.jsonl").read_text().splitlines()[-1])


def close(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm, *more: str) -> int:
    monkeypatch.setenv("SLURM_JOB_ID", fake.submit("--nodes=2"))
    monkeypatch.setattr(attempt, "SystemRunner", lambda: fake)
    number = folder.begin_attempt(["gpu1"], 0.0, os.environ["SLURM_JOB_ID"], checkpoint=None)
    stopped = replace_attempt(event("preempted", "asked to stop"), number)
    (folder.path / "events.jsonl").write_text(json.dumps(stopped.to_json()) + "\n")
    words = ["--folder", str(folder.path), "--attempt", str(number), "--code", "75"]
    return attempt.end([*words, *more])


def replace_attempt(said: Event, number: int) -> Event:
    return said.model_copy(update={"attempt": number})


def test_the_end_of_a_submitted_job_requeues_it(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSlurm()
    assert close(folder, monkeypatch, fake, "--requeue") == 75
    assert fake.jobs[1].restarts == 1
    assert folder.attempts()[-1]["reason"] == "stopped before the time limit, saved, and back to the queue"


def test_in_an_allocation_nothing_is_requeued(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSlurm()
    assert close(folder, monkeypatch, fake) == 75
    assert fake.jobs[1].restarts == 0
    assert last_event(folder)["data"] == {"cancelled": True}
    assert "hpctrain resubmit" in folder.attempts()[-1]["reason"]


def test_a_finished_run_is_a_success_whatever_srun_gave(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSlurm()
    (folder.path / run.FINISHED).touch()
    assert close(folder, monkeypatch, fake, "--requeue") == 0
    assert folder.attempts()[-1]["code"] == 0
    assert fake.jobs[1].restarts == 0


def test_a_job_that_loops_ends_with_an_event(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        folder.begin_attempt(["gpu1"], 0.0, "1", checkpoint=None)
    fake = FakeSlurm()
    assert close(folder, monkeypatch, fake, "--requeue") == 75
    assert fake.jobs[1].restarts == 0
    assert last_event(folder)["kind"] == "failed"
    assert f"go on with `hpctrain resubmit {folder.path.name}`" in str(last_event(folder)["reason"])


LOADED_LATE = """
import os, sys
from hpctrain.node import __main__ as program, run

def loaded_late(argv):
    os.kill(os.getpid(), int(sys.argv[1]))
    stop = run._StopRequest(None)
    stop.listen()
    return 75 if stop() else 0

run.main = loaded_late
sys.exit(program.main(["run"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_while_the_program_loads_is_heard_later(number: signal.Signals) -> None:
    """In a process of its own: a signal goes to any thread that does not block it."""
    done = subprocess.run([sys.executable, "-c", LOADED_LATE, str(int(number))], timeout=60, check=False)
    assert done.returncode == 75


@pytest.mark.parametrize(
    ("ending", "verdict", "state"),
    [
        (Ending(0, False, False, None), Verdict(False, "all steps are done"), "done"),
        (Ending(1, True, True, None), Verdict(True, "preempted, saved, and back to the queue"), "requeued"),
        (Ending(1, True, True, None), Verdict(False, "Slurm took the job (REQUEUED)"), "requeued"),
        (Ending(1, True, True, None), decide_end(Ending(1, True, True, None), None, cancelled=True), "cancelled"),
        (Ending(1, True, False, None), Verdict(False, "the job could not be requeued", failed=True), "failed"),
        (Ending(1, False, False, "a worker ended"), Verdict(False, "a worker ended"), "failed"),
    ],
)
def test_the_end_of_an_attempt_has_one_name_towards_the_outside(ending: Ending, verdict: Verdict, state: str) -> None:
    assert told_state(ending, verdict) == state
