"""Before and after queueing: what is refused, what is waited for, and how a run is cancelled."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_clock import FakeClock
from fake_slurm import FakeSlurm

from hpctrain.base.errors import InputError, Refused
from hpctrain.launch.cancel import cancel_job, is_cancelled
from hpctrain.launch.file_system import check_shared, file_system_of
from hpctrain.launch.job_nodes import nodes_of_job
from hpctrain.launch.queue import check_queue, wait_for_job
from hpctrain.launch.site import with_exported
from hpctrain.records.run import Run
from hpctrain.slurm.commands import Slurm


def run(**cluster: object) -> Run:
    return Run.from_json(
        {
            "name": "gpt",
            "steps": 10,
            "model": {"preset": "tiny-1m"},
            "data": {"train": ["/data"]},
            "batch": {"global": 8},
            "cluster": {"kind": "slurm", "nodes": "2", **cluster},
        }
    )


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Decides what file system there is."""
    return lambda name: monkeypatch.setattr("hpctrain.launch.file_system.file_system_of", lambda path: name)


def test_what_fits_is_silent_and_asks_for_the_nodes_once(tmp_path: Path, kind: Callable[[str], None]) -> None:
    kind("nfs4")
    fake = FakeSlurm()
    assert check_queue(run(), Slurm(fake), tmp_path) == []
    assert sum(argv[1:3] == ("show", "node") for argv in fake.argvs) == 1


def test_an_option_with_a_key_of_its_own_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cluster\.sbatch: found --partition; write cluster\.partition"):
        check_queue(run(sbatch=["--partition=nosuch"]), Slurm(FakeSlurm()), tmp_path)


def test_every_reason_for_a_refusal_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        check_queue(run(nodes="40", partition="nowhere"), Slurm(FakeSlurm()), tmp_path)
    assert "nowhere" in str(caught.value)
    with pytest.raises(Refused, match="40"):
        check_queue(run(nodes="40"), Slurm(FakeSlurm()), tmp_path)


def test_no_slurm_is_one_line(tmp_path: Path) -> None:
    fake = FakeSlurm()
    fake.installed = False
    with pytest.raises(InputError, match="no Slurm on the path"):
        check_queue(run(), Slurm(fake), tmp_path)


def test_a_controller_that_is_away_does_not_stop_the_submission_but_is_said(tmp_path: Path) -> None:
    fake = FakeSlurm()
    fake.away = True
    lines = check_queue(run(), Slurm(fake), tmp_path)
    assert len(lines) == 1
    assert lines[0].startswith("not checked before submitting")


def test_a_run_folder_in_memory_is_refused() -> None:
    shared_memory = Path("/dev/shm/runs")
    if file_system_of(shared_memory) != "tmpfs":
        pytest.fail("/dev/shm is no tmpfs on this machine; the check needs another example")
    with pytest.raises(InputError, match="must lie on a file system that all nodes share"):
        check_queue(run(), Slurm(FakeSlurm()), shared_memory)


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        ("ext4", True),
        ("xfs", True),
        ("overlay", True),
        ("", True),
        ("nfs4", False),
        ("lustre", False),
        ("fuse.juicefs", False),
    ],
)
def test_a_file_system_that_is_one_machines_as_a_rule_is_said(
    tmp_path: Path, kind: Callable[[str], None], name: str, warned: bool
) -> None:
    kind(name)
    lines = check_queue(run(), Slurm(FakeSlurm()), tmp_path)
    assert len(lines) == warned
    assert all("set HPCTRAIN_RUNS" in line for line in lines)
    assert check_shared(tmp_path, [platform.node()]) == []  # a cluster of this one machine


def test_a_variable_that_the_site_has_people_export_stands_in_for_an_open_key() -> None:
    environ = {"SBATCH_ACCOUNT": "physics", "SBATCH_PARTITION": "high", "SBATCH_QOS": ""}
    taken, lines = with_exported(run(partition="low"), environ)
    assert (taken.cluster.partition, taken.cluster.account, taken.cluster.qos) == ("low", "physics", None)
    assert lines == ["cluster.account: physics, from SBATCH_ACCOUNT"]


@pytest.mark.parametrize(
    ("cluster", "nodes"),
    [
        ({}, {"gpu1", "gpu2", "gpu3"}),
        ({"partition": "high"}, {"gpu1", "gpu2", "gpu3"}),
        ({"partition": "nosuch"}, set()),
        ({"sbatch": ["--nodelist=gpu[2-9]", "--exclude gpu3"]}, {"gpu2"}),
        ({"sbatch": ["--constraint=a100"]}, None),
    ],
)
def test_the_nodes_that_a_job_may_get(cluster: dict[str, object], nodes: set[str] | None) -> None:
    assert nodes_of_job(run(**cluster), Slurm(FakeSlurm()), {}) == nodes


def test_inside_an_allocation_the_nodes_are_known() -> None:
    fake = FakeSlurm()
    assert nodes_of_job(run(), Slurm(fake), {"SLURM_JOB_NODELIST": "gpu[1-2]"}) == {"gpu1", "gpu2"}
    fake.away = True
    assert nodes_of_job(run(), Slurm(fake), {}) is None


def test_waiting_tells_changes_once_and_ends_with_the_run(tmp_path: Path) -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=2", "--job-name=gpt")
    (tmp_path / "attempts.jsonl").write_text(json.dumps({"attempt": 0, "code": 0}) + "\n")
    looks = 0

    def passed(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            fake.finish(job)

    said: list[str] = []
    clock = FakeClock(on_sleep=passed)
    assert wait_for_job(tmp_path, job, Slurm(fake), clock, said.append) == 0
    assert len(said) == len(set(said))
    assert any("running" in text for text in said)


def test_waiting_outlives_a_controller_that_is_away_for_a_while(tmp_path: Path) -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=2", "--job-name=gpt")
    fake.away = True
    looks = 0

    def passed(seconds: float) -> None:
        nonlocal looks
        looks += 1
        fake.away = looks < 20
        if looks == 25:
            fake.finish(job, code=1)

    said: list[str] = []
    assert wait_for_job(tmp_path, job, Slurm(fake), FakeClock(on_sleep=passed), said.append) == 1
    assert sum("does not answer" in text for text in said) == 1


def test_cancelling_a_running_job_gives_it_time_to_save(tmp_path: Path) -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=2", "--job-name=gpt")
    seconds = 0.0

    def passed(slept: float) -> None:
        nonlocal seconds
        seconds += slept
        if seconds >= 5:
            fake.finish(job, code=75)

    told = cancel_job(tmp_path, job, Slurm(fake), FakeClock(on_sleep=passed))
    assert told == f"job {job} ended; there is no checkpoint yet, nothing was saved"
    assert is_cancelled(tmp_path)
    assert any("TERM" in word for argv in fake.argvs for word in argv)


def test_a_run_that_failed_is_not_marked_as_cancelled(tmp_path: Path) -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=2")
    fake.finish(job, code=1)
    assert cancel_job(tmp_path, job, Slurm(fake), FakeClock()) == f"job {job} has ended already"
    assert not is_cancelled(tmp_path)


def test_cancelling_does_not_wait_for_ever(tmp_path: Path) -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=2", "--job-name=gpt")
    told = cancel_job(tmp_path, job, Slurm(fake), FakeClock())
    assert "had not ended 60 s after it was asked to save" in told


def test_cancelling_a_waiting_job_is_immediate(tmp_path: Path) -> None:
    fake = FakeSlurm()
    fake.submit("--nodes=3", "--job-name=first")
    job = fake.submit("--nodes=3", "--job-name=gpt")
    clock = FakeClock()
    assert cancel_job(tmp_path, job, Slurm(fake), clock) == f"job {job} cancelled; it was waiting"
    assert clock.now() == 0
