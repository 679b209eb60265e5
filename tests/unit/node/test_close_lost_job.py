"""A finished run whose script was lost with the batch node: one of the others ends the job, and nobody else does."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from fake_clock import FakeClock
from fake_slurm import FakeSlurm
from run_folders import RUN, event, submitted_run

from hpctrain.jobs.dependencies import DEPENDENT_RUNS_FILE
from hpctrain.node import attempt
from hpctrain.node.close_lost_job import close
from hpctrain.node.exit_markers import (
    ScriptWatch,
    closer_files,
    closing_node,
    name_closer,
    name_closing_node,
    write_departure,
)
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import job_id, record_job


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(attempt, "SystemRunner", lambda: fake)
    return fake


@pytest.fixture
def job(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> str:
    job = fake.submit("--nodes=2")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu2")
    monkeypatch.setenv("HPCTRAIN_BATCH_HOST", "gpu1")
    return job


@pytest.fixture
def folder(fake: FakeSlurm, job: str, tmp_path: Path) -> Path:
    """A finished run: its attempt is open still, a successor waits behind its job, and another run for its good end."""
    folder = submitted_run(tmp_path, job, event("finished", step=10))
    RunFolder(folder).begin_attempt(["gpu1", "gpu2"], 0.0, job)
    (folder / "left").mkdir()
    name_closer(folder, 0, "gpu2")
    behind = {"job_id": fake.submit("--nodes=2", f"--dependency=afterany:{job}"), "after": job, "time_s": 0.0}
    (folder / "successors.jsonl").write_text(json.dumps(behind) + "\n")
    waiting = fake.submit("--nodes=1", f"--dependency=afterok:{job}", "--hold")
    later = submitted_run(tmp_path, waiting, name="later-20260101T000000Z-00ff")
    cluster = {**RUN["cluster"], "after": [str(folder)]}  # type: ignore[dict-item]
    (later / "run.yaml").write_text(json.dumps({**RUN, "cluster": cluster}))
    (folder / DEPENDENT_RUNS_FILE).write_text(f"{later}\n")
    return folder


def test_the_job_of_a_finished_run_ends_at_once_without_its_script(folder: Path, fake: FakeSlurm, job: str) -> None:
    clock = FakeClock()
    assert close(folder, 0, 0, "new_job", fake, clock)
    (line,) = RunFolder(folder).attempts()
    assert (line["class"], line["code"]) == ("done", 0)
    assert fake.jobs[int(job)].state == "CANCELLED"
    # What waits behind it is not needed, and what waits for its good end may start although Slurm saw none.
    assert fake.jobs[2].state == "CANCELLED"
    assert fake.jobs[3].dependency == ""
    assert clock.now() < 15


def test_a_script_that_is_there_ends_its_job_itself(folder: Path, fake: FakeSlurm, job: str) -> None:
    """The batch node is cut off from the others, and not lost."""
    clock = FakeClock(on_sleep=lambda _: (folder / "left" / "0.seen").touch())
    assert not close(folder, 0, 0, "new_job", fake, clock)
    assert fake.jobs[int(job)].state == "RUNNING"
    assert "end" not in RunFolder(folder).attempts()[0]


def test_an_attempt_that_is_closed_is_left_alone(folder: Path, fake: FakeSlurm, job: str) -> None:
    RunFolder(folder).end_attempt(0, 1.0, "all steps are done", 0, "done")
    assert not close(folder, 0, 0, "new_job", fake, FakeClock())
    assert fake.jobs[int(job)].state == "RUNNING"


@pytest.fixture
def unfinished(fake: FakeSlurm, job: str, tmp_path: Path) -> Path:
    folder = submitted_run(tmp_path, job, event("preempted", 0, "asked to stop by SIGTERM", asked_by="SIGTERM"))
    RunFolder(folder).begin_attempt(["gpu1", "gpu2"], 0.0, job)
    (folder / "left").mkdir()
    name_closer(folder, 0, "gpu2")
    (folder / "submitit").mkdir()
    (folder / "submitit" / f"{job}_submitted.pkl").touch()
    return folder


def test_a_run_whose_script_is_lost_goes_on_as_another_job(unfinished: Path, fake: FakeSlurm, job: str) -> None:
    assert close(unfinished, 0, 75, "new_job", fake, FakeClock())
    (line,) = RunFolder(unfinished).attempts()
    assert line["code"] == 75
    assert fake.jobs[int(job)].state == "CANCELLED"
    assert job_id(unfinished) == "2"
    assert fake.jobs[2].dependency.startswith(f"afterany:{job}")


def test_a_job_that_goes_back_to_the_queue_is_not_cancelled(unfinished: Path, fake: FakeSlurm, job: str) -> None:
    assert close(unfinished, 0, 75, "same_job", fake, FakeClock())
    assert fake.jobs[int(job)].state == "PENDING"


def test_the_last_node_ends_the_job_once_slurm_has_given_up_the_dead_ones(
    unfinished: Path, fake: FakeSlurm, job: str
) -> None:
    """Two of three nodes died, so that the last one left without knowing whether they train on."""
    (unfinished / "left" / "0.closer").unlink()
    write_departure(unfinished, 0, "gpu2", 75)
    running = fake.jobs[int(job)]
    fake.jobs[int(job)] = replace(running, nodes=("gpu1", "gpu2", "gpu3"))
    polls = []

    def later(_: float) -> None:
        polls.append(fake.jobs[int(job)].state)
        if len(polls) == 60:
            fake.jobs[int(job)] = running

    assert close(unfinished, 0, 75, "new_job", fake, FakeClock(on_sleep=later))
    assert polls == 60 * ["RUNNING"]
    assert RunFolder(unfinished).attempts()[0]["code"] == 75
    assert fake.jobs[int(job)].state == "CANCELLED"
    assert job_id(unfinished) == "2"


@pytest.mark.parametrize("sign", ["0.alive", "0.seen", "0/gpu1"])
def test_a_node_that_leaves_alone_leaves_the_job_to_its_script(
    unfinished: Path, fake: FakeSlurm, job: str, sign: str
) -> None:
    (unfinished / "left" / "0.closer").unlink()
    clock = FakeClock(on_sleep=lambda _: (unfinished / "left" / sign).touch())
    assert not close(unfinished, 0, 75, "new_job", fake, clock)
    assert clock.now() < 2
    assert fake.jobs[int(job)].state == "RUNNING"


def test_a_node_leaves_the_job_to_the_one_that_ends_it(unfinished: Path, fake: FakeSlurm, job: str) -> None:
    """The one that is named touches its file, until Slurm ends the others with the job."""
    closer = unfinished / "left" / "0.closer"
    closer.write_text("gpu3\n")
    touches: list[float] = []

    def touch(_: float) -> None:
        touches.append(clock.now())
        os.utime(closer, ns=(0, len(touches)))
        if len(touches) == 1000:
            (unfinished / "left" / "0.seen").touch()  # ends the wait

    clock = FakeClock(on_sleep=touch)
    assert not close(unfinished, 0, 75, "new_job", fake, clock)
    assert touches[-1] > 200
    assert closer_files(unfinished, 0) == [closer]
    assert fake.jobs[int(job)].state == "RUNNING"


@pytest.mark.parametrize("dead_after", ["nothing", "record", "queue"])
def test_a_node_that_is_lost_while_it_ends_the_job_is_replaced(
    unfinished: Path, fake: FakeSlurm, job: str, dead_after: str
) -> None:
    """Whatever it had done, the run goes on as one other job, and its own one ends."""
    (unfinished / "left" / "0.closer").write_text("gpu3\n")
    if dead_after != "nothing":
        RunFolder(unfinished).end_attempt(0, 1.0, "stopped, saved, and back to the queue", 75, "resumable")
    if dead_after == "queue":
        record_job(unfinished, fake.submit("--nodes=2", f"--dependency=afterany:{job}"))
    assert close(unfinished, 0, 75, "new_job", fake, FakeClock())
    assert closing_node(unfinished, 0) == "gpu2"
    assert fake.jobs[int(job)].state == "CANCELLED"
    assert job_id(unfinished) == "2"
    assert sorted(fake.jobs) == [1, 2]


def test_of_those_that_replace_a_lost_node_one_is_named(tmp_path: Path) -> None:
    named = [name_closer(tmp_path, 0, node, replaced) for replaced in (0, 1) for node in ("gpu2", "gpu3")]
    assert named == [True, False, True, False]
    assert closing_node(tmp_path, 0) == "gpu2"


@pytest.mark.parametrize(
    ("node", "members", "batch_host", "named"),
    [
        ("b", ["b", "c"], "a", True),
        ("c", ["b", "c"], "a", False),  # one is enough
        ("a", ["a", "b"], "a", False),  # its script is there
        ("b", ["b", "c"], None, False),  # nobody's job
    ],
)
def test_one_node_closes_where_the_batch_node_is_lost(
    tmp_path: Path, node: str, members: list[str], batch_host: str | None, named: bool
) -> None:
    name_closing_node(tmp_path, 1, node, members, batch_host)
    assert closing_node(tmp_path, 1) == (node if named else None)


def test_a_batch_node_that_came_back_has_no_script(tmp_path: Path) -> None:
    """It may be the one that closes, and its agent leaves like any other."""
    write_departure(tmp_path, 1, "a", 75)
    (tmp_path / "left" / "1.returned").touch()
    assert not ScriptWatch(tmp_path, 1, "a").is_alive()
    name_closing_node(tmp_path, 1, "a", ["a", "b"], "a")
    assert closing_node(tmp_path, 1) == "a"
