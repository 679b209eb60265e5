"""The jobs behind a job: queued, renewed, topped up and cancelled, by id and through files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_clock import FakeClock
from fake_slurm import FakeSlurm
from run_folders import RUN

from hpctrain.base.errors import CommandError, StorageError
from hpctrain.jobs.successors import (
    cancel_job,
    cancel_successors,
    ensure_queued,
    is_cancelled,
    queue_successors,
    submit_next,
    waiting_successors,
)
from hpctrain.launch.slurm_job.queue import wait_for_job
from hpctrain.records.history.ledger import BAD_NODES_FILE, Successor, job_chain, queued_behind, read_successors
from hpctrain.records.run.run import Run
from hpctrain.runs.locate import find_run, job_id, open_jobs, record_job
from hpctrain.slurm.commands import ControllerUnreachableError, Slurm


def run(**recovery: object) -> Run:
    return Run.from_json({**RUN, "recovery": recovery})


@pytest.fixture
def fake() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def folder(tmp_path: Path, fake: FakeSlurm) -> Path:
    """A run whose job runs."""
    folder = tmp_path / "runs" / "gpt-20260101T000000Z-00ff"
    (folder / "submitit").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "run.yaml").write_text(json.dumps(RUN))
    (folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\n")
    record_job(folder, fake.submit("--nodes=2"))
    (folder / "submitit" / "1_submitted.pkl").write_bytes(b"the task")
    return folder


def sbatches(fake: FakeSlurm, folder: Path) -> list[tuple[str, ...]]:
    return [argv[2:-1] for argv in fake.argvs if argv[0] == "sbatch" and argv[-1] == str(folder / "job.sh")]


def blame(folder: Path, *nodes: str, expires_s: float = 1e12) -> None:
    lines = [
        {"node": node, "attempt": 0, "time_s": 0, "expires_s": expires_s, "reason": "it was lost"} for node in nodes
    ]
    (folder / BAD_NODES_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_successors_wait_for_one_another(fake: FakeSlurm, folder: Path, tmp_path: Path) -> None:
    wanted, slurm = run(successors=2), Slurm(fake)
    assert queue_successors(folder, wanted, slurm, 5.0) == ["queued behind it: 2, 3"]
    assert sbatches(fake, folder) == [("--dependency=afterany:1",), ("--dependency=afterany:2",)]
    assert job_id(folder) == "1"
    assert open_jobs(folder) == ["1", "2", "3"]
    assert find_run("3", {}, tmp_path) == folder
    assert (folder / "submitit" / "3_submitted.pkl").read_bytes() == b"the task"
    assert ensure_queued(folder, wanted, slurm, 6.0) == []
    # One takes over and keeps the number up.
    fake.finish("1", code=1)
    record_job(folder, "2")
    assert open_jobs(folder) == ["2", "3"]
    assert ensure_queued(folder, wanted, slurm, 7.0) == ["4"]
    assert [(item.job_id, item.after) for item in read_successors(folder)] == [("2", "1"), ("3", "2"), ("4", "3")]
    assert job_chain("4", read_successors(folder)) == ["1", "2", "3", "4"]


def test_no_successors_are_queued_unless_they_are_wanted(fake: FakeSlurm, folder: Path) -> None:
    assert queue_successors(folder, run(), Slurm(fake), 0.0) == []
    assert sbatches(fake, folder) == []


def test_a_refused_successor_is_said_and_the_job_stays(fake: FakeSlurm, folder: Path) -> None:
    (folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=9\n")
    (line,) = queue_successors(folder, run(successors=2), Slurm(fake), 0.0)
    assert "not all are queued (sbatch --parsable" in line
    assert fake.jobs[1].state == "RUNNING"


def test_what_waits_goes_on_and_learns_of_bad_nodes(
    fake: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, slurm, changes = run(successors=2, exclude_max_fraction=0.4), Slurm(fake), []
    ensure_queued(folder, wanted, slurm, 0.0)
    blame(folder, "gpu2")
    monkeypatch.setattr(slurm, "update", lambda job, **fields: changes.append((job, fields)))
    assert submit_next(folder, wanted, slurm, 1.0) == "2"
    assert changes == [("2", {"ExcNodeList": "gpu2"}), ("3", {"ExcNodeList": "gpu2"})]
    assert job_id(folder) == "2"
    assert len(sbatches(fake, folder)) == 2
    assert job_chain("3", read_successors(folder)) == ["1", "2", "3"]
    # A job that was killed excluded nothing; the one that begins after it does.
    blame(folder, "gpu1")
    assert ensure_queued(folder, wanted, slurm, 2.0) == ["4"]
    assert changes[2:] == [("3", {"ExcNodeList": "gpu1"})]
    assert ensure_queued(folder, wanted, slurm, 3.0) == []
    assert len(changes) == 3, "no job is changed twice"
    assert open_jobs(folder) == ["2", "3", "4"]


def test_where_none_waits_a_new_job_is_queued(fake: FakeSlurm, folder: Path) -> None:
    blame(folder, "gpu2", "gpu9", expires_s=10.0)
    wanted = run(exclude_max_fraction=0.4)
    assert submit_next(folder, wanted, Slurm(fake), 5.0) == "2"
    assert sbatches(fake, folder) == [("--dependency=afterany:1", "--exclude=gpu2")]
    assert read_successors(folder)[0].exclude == ["gpu2"]
    assert submit_next(folder, wanted, Slurm(fake), 15.0) == "3", "what is newest waits, so the next comes behind it"
    assert sbatches(fake, folder)[1] == ("--dependency=afterany:2",), "gpu2 is forgiven by then"


def test_what_only_the_first_job_was_to_wait_for(fake: FakeSlurm, folder: Path) -> None:
    (folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --hold\n#SBATCH --begin=tomorrow\n")
    waits = Run.from_json({**RUN, "cluster": {**RUN["cluster"], "sbatch": ["--hold", "--begin=tomorrow"]}})
    submit_next(folder, waits, Slurm(fake), 0.0)
    assert sbatches(fake, folder) == [("--dependency=afterany:1", "--begin=now")]
    fake.finish("1", code=75)
    assert fake.jobs[2].state == "RUNNING"


def test_a_job_that_nobody_wrote_down_is_taken(fake: FakeSlurm, folder: Path) -> None:
    class Deaf(FakeSlurm):
        """Takes a job, and is away before it answers."""

        def _sbatch(self, argv):  # type: ignore[no-untyped-def]
            super()._sbatch(argv)
            return self._reply(argv, error="sbatch: error: Socket timed out on send/recv operation\n")

    deaf = Deaf()
    deaf.jobs, deaf.node_states = fake.jobs, fake.node_states
    with pytest.raises(ControllerUnreachableError):
        submit_next(folder, run(), Slurm(deaf), 0.0)
    fake.submit("--nodes=2", "--dependency=afterany:1")  # another run's
    assert submit_next(folder, run(), Slurm(fake), 1.0) == "2"
    assert [job.script for job in fake.jobs.values()].count(str(folder / "job.sh")) == 1
    assert (folder / "submitit" / "2_submitted.pkl").exists()
    assert submit_next(folder, run(), Slurm(fake), 2.0) == "4", "the next one is a new one"


def test_a_job_that_could_not_start_without_a_node_gets_it(fake: FakeSlurm, folder: Path) -> None:
    class Strict(FakeSlurm):
        def _sbatch(self, argv):  # type: ignore[no-untyped-def]
            if any(word.startswith("--exclude") for word in argv):
                text = "allocation failure: Requested node configuration is not available\n"
                return self._reply(argv, error=text)
            return super()._sbatch(argv)

    strict = Strict()
    strict.submit("--nodes=2")
    blame(folder, "gpu2")
    assert submit_next(folder, run(exclude_max_fraction=1.0), Slurm(strict), 0.0) == "2"
    assert read_successors(folder)[0].exclude == []


def test_a_job_that_cannot_be_noted_is_taken_back(fake: FakeSlurm, folder: Path) -> None:
    (folder / "submitit" / "1_submitted.pkl").unlink()
    with pytest.raises(StorageError):
        submit_next(folder, run(), Slurm(fake), 0.0)
    assert fake.jobs[2].state == "CANCELLED"
    assert job_id(folder) == "1"


def test_a_cancel_takes_all_that_wait(fake: FakeSlurm, folder: Path) -> None:
    slurm = Slurm(fake)
    ensure_queued(folder, run(successors=2), slurm, 0.0)
    clock = FakeClock(on_sleep=lambda _: fake.finish("1", code=75) if fake.jobs[1].state == "RUNNING" else None)
    assert "job 1 ended" in cancel_job(folder, "1", slurm, clock)
    assert [fake.jobs[number].state for number in (2, 3)] == ["CANCELLED", "CANCELLED"]
    assert is_cancelled(folder)
    assert (
        cancel_job(folder, "1", slurm, clock)
        == "job 1 has ended already; there is no checkpoint yet, nothing was saved"
    )


def test_a_cancel_between_two_jobs_takes_the_one_that_waits(fake: FakeSlurm, folder: Path) -> None:
    slurm = Slurm(fake)
    fake.submit("--nodes=3")
    queue_successors(folder, run(successors=1), slurm, 0.0)
    fake.finish("1", code=1)
    assert (
        cancel_job(folder, "1", slurm, FakeClock())
        == "jobs 3 cancelled; they were waiting; there is no checkpoint yet, nothing was saved"
    )
    assert fake.jobs[3].state == "CANCELLED"


def test_successors_are_cancelled_by_their_ids_alone(fake: FakeSlurm, folder: Path) -> None:
    slurm = Slurm(fake)
    other = fake.submit("--nodes=3", "--job-name=gpt")
    added = ensure_queued(folder, run(successors=2), slurm, 0.0)
    assert cancel_successors(folder, slurm) == added
    assert fake.jobs[int(other)].state == "PENDING"
    assert waiting_successors(folder, slurm) == []
    fake.away = True
    with pytest.raises(CommandError):
        cancel_successors(folder, slurm)


def test_waiting_for_a_run_follows_it_from_job_to_job(fake: FakeSlurm, folder: Path) -> None:
    slurm, looks = Slurm(fake), 0

    def passed(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            submit_next(folder, run(), slurm, 0.0)
            fake.finish("1", code=75)
        if looks == 5:
            (folder / "attempts.jsonl").write_text(json.dumps({"attempt": 0, "code": 0}) + "\n")
            fake.finish("2")

    said: list[str] = []
    assert wait_for_job(folder, "1", slurm, FakeClock(on_sleep=passed), said.append) == 0
    assert any(text.startswith("job 2") for text in said)


def test_a_chain_is_read_from_its_links() -> None:
    def link(job: str, after: str) -> Successor:
        return Successor(job_id=job, after=after, time_s=0.0)

    links = [link("2", "1"), link("3", "2"), link("9", "8"), link("3", "2")]
    assert job_chain("3", links) == ["1", "2", "3"]
    assert job_chain("7", links) == ["7"]
    assert queued_behind("1", links) == ["2", "3"]
    assert queued_behind("8", links) == ["9"]
    # A file that somebody bent into a ring ends all the same.
    assert job_chain("1", [*links, link("1", "3")]) == ["2", "3", "1"]
