"""Runs that wait for runs: what is looked up, what is refused, and what follows a run to its next job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from run_folders import RUN, submitted_run

from hpctrain.base.errors import FileError, InputError, RefusedError
from hpctrain.jobs.dependencies import (
    JobDependencies,
    find_dependencies,
    record_dependent_run,
    refresh_dependency,
    refresh_dependent_runs,
)
from hpctrain.records.run.run import Run
from hpctrain.runs.locate import record_job
from hpctrain.slurm.commands import Slurm


def asked(*after: str, end: str = "ok") -> Run:
    return Run.from_json({**RUN, "cluster": {**RUN["cluster"], "after": list(after), "after_end": end}})


def before(fake: FakeSlurm, cwd: Path, *after: str, end: str = "ok") -> JobDependencies:
    return find_dependencies(asked(*after, end=end), Slurm(fake), {}, cwd)


def ended(folder: Path, code: int) -> None:
    (folder / "attempts.jsonl").write_text(json.dumps({"attempt": 0, "code": code}) + "\n")


def test_a_run_is_waited_for_by_its_newest_job(tmp_path: Path) -> None:
    fake = FakeSlurm()
    old, new = fake.submit("--nodes=1"), fake.submit("--nodes=1")
    fake.finish(old, code=1)
    folder = submitted_run(tmp_path / "runs", old)
    record_job(folder, new)
    found = before(fake, tmp_path, "gpt")
    assert (found.jobs, found.names, found.folders) == ([new], [str(folder)], [folder])
    assert found.lines == [f"it starts after {folder.name} (job {new})"]


def test_what_has_ended_is_not_waited_for_and_a_bad_end_is_refused(tmp_path: Path) -> None:
    fake = FakeSlurm()
    folder = submitted_run(tmp_path / "runs", None)
    ended(folder, 0)
    assert before(fake, tmp_path, "gpt").jobs == []
    ended(folder, 1)
    with pytest.raises(
        RefusedError, match=r"did not finish; `hpctrain resubmit gpt-\S+` first, or set cluster\.after_end"
    ):
        before(fake, tmp_path, "gpt")
    assert before(fake, tmp_path, "gpt", end="any").lines == [f"{folder.name} has ended already: nothing to wait for"]


def test_a_job_that_is_no_runs(tmp_path: Path) -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=1")
    assert before(fake, tmp_path, job).jobs == [job]
    fake.finish(job, code=1)
    assert before(fake, tmp_path, job, end="any").jobs == []
    with pytest.raises(RefusedError, match="has ended as FAILED"):
        before(fake, tmp_path, job)
    with pytest.raises(InputError, match="knows no job 77"):
        before(fake, tmp_path, "77")
    with pytest.raises(InputError, match=r"cluster\.after: nosuch: no such run"):
        before(fake, tmp_path, "nosuch")


@pytest.mark.parametrize("reason", ["Dependency", "DependencyNeverSatisfied"])
def test_who_waits_for_a_run_waits_for_its_next_job(tmp_path: Path, reason: str) -> None:
    fake = FakeSlurm()
    first = submitted_run(tmp_path / "runs", fake.submit("--nodes=1"), name="first-20260101T000000Z-00ff")
    second = submitted_run(tmp_path / "runs", None, name="second-20260101T000001Z-00ff")
    waits = {**RUN, "cluster": {**RUN["cluster"], "after": [str(first)]}}
    (second / "run.yaml").write_text(json.dumps(waits))
    record_dependent_run(before(fake, tmp_path, "first"), second)
    record_dependent_run(before(fake, tmp_path, "first"), second)
    record_job(second, fake.submit("--nodes=1", "--dependency=afterok:1"))
    if reason != "Dependency":
        fake.finish("1", code=1)
    assert fake.jobs[2].reason == reason
    record_job(first, fake.submit("--nodes=1"))
    assert refresh_dependent_runs(first, Slurm(fake), {}) == [f"{second.name} (job 2) waits for job 3"]
    assert (fake.jobs[2].reason, fake.jobs[2].dependency) == ("Dependency", "afterok:3")
    fake.finish("3")
    assert fake.jobs[2].state == "RUNNING"
    assert refresh_dependent_runs(first, Slurm(fake), {}) == []  # it runs: it waits for nothing


def test_a_follower_that_is_held_is_moved_and_one_that_has_begun_is_not(tmp_path: Path) -> None:
    fake = FakeSlurm()
    first = submitted_run(tmp_path / "runs", fake.submit("--nodes=1"), name="first-20260101T000000Z-00ff")
    second = submitted_run(tmp_path / "runs", None, name="second-20260101T000001Z-00ff")
    (second / "run.yaml").write_text(json.dumps({**RUN, "cluster": {**RUN["cluster"], "after": [str(first)]}}))
    found = before(fake, tmp_path, "first")
    record_dependent_run(found, second)
    record_job(second, fake.submit("--nodes=1", "--hold", "--dependency=afterok:1"))
    assert refresh_dependency(second, Slurm(fake), {}, found.jobs) == [], "nothing has changed"
    record_job(first, fake.submit("--nodes=1"))
    fake.finish("1", code=75)
    assert len(refresh_dependent_runs(first, Slurm(fake), {})) == 1
    assert (fake.jobs[2].reason, fake.jobs[2].dependency) == ("JobHeldUser", "afterok:3")
    record_job(first, fake.submit("--nodes=1"))
    fake.finish("3", code=75)
    assert len(refresh_dependency(second, Slurm(fake), {}, ["3"])) == 1, "it went on while this one was submitted"
    assert fake.jobs[2].dependency == "afterok:4"
    ended(second, 75)  # back in the queue
    assert refresh_dependent_runs(first, Slurm(fake), {}) == []


def test_where_any_end_counts_the_successors_are_waited_for_too(tmp_path: Path) -> None:
    fake = FakeSlurm()
    folder = submitted_run(tmp_path / "runs", fake.submit("--nodes=1"))
    behind = {"job_id": fake.submit("--nodes=1", "--dependency=afterany:1"), "after": "1", "time_s": 0.0}
    (folder / "successors.jsonl").write_text(json.dumps(behind) + "\n")
    assert before(fake, tmp_path, "gpt", end="any").jobs == ["1", "2"]
    assert before(fake, tmp_path, "gpt").jobs == ["1"], "one that is not needed is cancelled: no good end"


def test_a_follower_that_cannot_be_moved_is_told_and_one_that_is_gone_is_not(tmp_path: Path) -> None:
    fake = FakeSlurm()
    first = submitted_run(tmp_path / "runs", fake.submit("--nodes=1"), name="first-20260101T000000Z-00ff")
    second = submitted_run(tmp_path / "runs", None, name="second-20260101T000001Z-00ff")
    record_dependent_run(before(fake, tmp_path, "first"), second)
    record_dependent_run(before(fake, tmp_path, "first"), tmp_path / "runs" / "gone")
    record_job(second, fake.submit("--nodes=1", "--dependency=afterok:1"))
    (second / "run.yaml").write_text("steps: [")
    (line,) = refresh_dependent_runs(first, Slurm(fake), {})
    assert line.startswith(f"{second.name} (job 2) may not start: ")
    fake.away = True
    (line,) = refresh_dependent_runs(first, Slurm(fake), {})
    assert "the Slurm controller is away" in line


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"groups": [{"constraint": "a100", "nodes": 2}], "nodes": 3}, "nodes is 3, and the groups have 2"),
        ({"groups": [{"constraint": "a100", "nodes": 2}], "constraint": "big"}, "exclude each other"),
        ({"groups": [{"constraint": "a|b", "nodes": 2}]}, "cluster.groups[0].constraint"),
        ({"constraint": "a b"}, "cluster.constraint"),
        ({"mail": {"on": ["NEVER"]}}, "cluster.mail.on[0]"),
        ({"after": [True]}, "cluster.after[0]"),
    ],
)
def test_what_a_run_file_may_not_say(cluster: dict[str, object], words: str) -> None:
    with pytest.raises(FileError) as caught:
        Run.from_json({**RUN, "cluster": {"kind": "slurm", **cluster}})
    assert words in str(caught.value)


def test_short_forms() -> None:
    assert Run.from_json({**RUN, "cluster": {"after": 7}}).cluster.after == ["7"]
    groups = [{"constraint": "a100", "nodes": 2}, {"constraint": "v100", "nodes": 1}]
    assert Run.from_json({**RUN, "cluster": {"groups": groups}}).cluster.node_range == (3, 3)
