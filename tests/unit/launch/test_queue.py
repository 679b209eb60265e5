"""Before and after queueing: what is refused, what is waited for, and how a run is cancelled."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_clock import FakeClock
from fake_slurm import FakeSlurm
from run_folders import slurm_run

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.jobs.partition_checks import nodes_of_allocation, nodes_of_job, with_gpu_request
from hpctrain.jobs.successors import cancel_job, is_cancelled
from hpctrain.launch.preflight.site import with_sbatch_variables
from hpctrain.launch.slurm_job.job_script import directives
from hpctrain.launch.slurm_job.queue import check_queue, wait_for_job
from hpctrain.records.run.run import Run
from hpctrain.runs.file_system import check_shared, file_system_of
from hpctrain.slurm.commands import Slurm


def run(**cluster: object) -> Run:
    return slurm_run(**{"nodes": "2", "partition": "low", "device": "cpu", **cluster})


def lines_of(asked: Run, fake: FakeSlurm, runs: Path) -> list[str]:
    """What a person is told, without the line about whole nodes (tests/unit/jobs/test_node_share.py)."""
    lines = check_queue(asked, Slurm(fake), runs, {}, runs).lines
    return [line for line in lines if not line.startswith("whole nodes")]


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Decides what file system there is."""
    return lambda name: monkeypatch.setattr("hpctrain.runs.file_system.file_system_of", lambda path: name)


def test_what_fits_is_silent_and_asks_for_the_nodes_once(tmp_path: Path, kind: Callable[[str], None]) -> None:
    kind("nfs4")
    fake = FakeSlurm()
    assert lines_of(run(), fake, tmp_path) == []
    for what in ("node", "partition", "config"):
        assert sum(argv[1:3] == ("show", what) for argv in fake.argvs) == 1


def test_an_option_with_a_key_of_its_own_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cluster\.sbatch: found --partition; write cluster\.partition"):
        lines_of(run(sbatch=["--partition=nosuch"]), FakeSlurm(), tmp_path)


def test_every_reason_for_a_refusal_is_told(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as caught:
        lines_of(run(nodes="40", partition="nowhere"), FakeSlurm(), tmp_path)
    assert "nowhere" in str(caught.value)
    with pytest.raises(RefusedError, match="40"):
        lines_of(run(nodes="40"), FakeSlurm(), tmp_path)


def test_no_slurm_is_one_line(tmp_path: Path) -> None:
    fake = FakeSlurm()
    fake.installed = False
    with pytest.raises(InputError, match="no Slurm on the path"):
        lines_of(run(), fake, tmp_path)


def test_a_controller_that_is_away_does_not_stop_the_submission_but_is_said(tmp_path: Path) -> None:
    fake = FakeSlurm()
    fake.away = True
    lines = lines_of(run(), fake, tmp_path)
    assert len(lines) == 1
    assert lines[0].startswith("not checked before submitting")


def test_a_run_folder_in_memory_is_refused() -> None:
    shared_memory = Path("/dev/shm/runs")
    if file_system_of(shared_memory) != "tmpfs":
        pytest.fail("/dev/shm is no tmpfs on this machine; the check needs another example")
    with pytest.raises(InputError, match="must lie on a file system that all nodes share"):
        lines_of(run(), FakeSlurm(), shared_memory)


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
    lines = lines_of(run(), FakeSlurm(), tmp_path)
    assert len(lines) == warned
    assert all("set HPCTRAIN_RUNS" in line for line in lines)
    assert check_shared(tmp_path, [platform.node()]) == []  # a cluster of this one machine


def test_a_variable_that_the_site_has_people_export_stands_in_for_an_open_key() -> None:
    environ = {"SBATCH_ACCOUNT": "physics", "SBATCH_PARTITION": "high", "SBATCH_QOS": ""}
    taken, lines = with_sbatch_variables(run(partition="low"), environ)
    assert (taken.cluster.partition, taken.cluster.account, taken.cluster.qos) == ("low", "physics", None)
    assert lines == ["cluster.account: physics, from SBATCH_ACCOUNT"]


@pytest.mark.parametrize(
    ("cluster", "nodes"),
    [
        ({}, {"gpu1", "gpu2", "gpu3"}),
        ({"partition": "high"}, {"gpu1", "gpu2", "gpu3"}),
        ({"partition": "nosuch"}, set()),
        ({"nodes": "2", "nodelist": "gpu[2,9]"}, {"gpu2"}),
        ({"nodes": "2", "nodelist": "gpu2"}, {"gpu1", "gpu2", "gpu3"}),
        ({"exclude": "gpu3"}, {"gpu1", "gpu2"}),
        ({"sbatch": ["--prefer=a100"]}, None),
        ({"constraint": "a100"}, set()),
        ({"constraint": "[a100*1&v100*1]"}, None),
        ({"reservation": "course"}, None),
        ({"groups": [{"constraint": "a100", "nodes": 2}]}, None),
    ],
)
def test_the_nodes_that_a_job_may_get(cluster: dict[str, object], nodes: set[str] | None) -> None:
    assert nodes_of_job(run(**cluster), Slurm(FakeSlurm()).state()) == nodes


def test_inside_an_allocation_the_nodes_are_known() -> None:
    assert nodes_of_allocation({"SLURM_JOB_NODELIST": "gpu[1-2]"}) == {"gpu1", "gpu2"}
    assert nodes_of_allocation({}) is None


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


NOTHING = "there is no checkpoint yet, nothing was saved"


def test_cancelling_at_once_asks_nobody_to_save(tmp_path: Path) -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=2")
    (tmp_path / "checkpoints" / "step-00000040").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000040" / "manifest.json").touch()
    told = cancel_job(tmp_path, job, Slurm(fake), FakeClock(), at_once=True)
    assert told == f"job {job} cancelled; it was running; the newest checkpoint is that of step 40"
    assert is_cancelled(tmp_path)
    assert fake.signals == []
    assert fake.jobs[int(job)].state == "CANCELLED"


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
    assert told == f"job {job} ended; {NOTHING}"
    assert is_cancelled(tmp_path)
    assert any("TERM" in word for argv in fake.argvs for word in argv)


def test_a_task_that_did_not_hear_is_asked_to_save_again(tmp_path: Path) -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=2", "--job-name=gpt")

    def passed(_: float) -> None:
        if len(fake.signals) == 3:
            fake.finish(job, code=75)

    assert cancel_job(tmp_path, job, Slurm(fake), FakeClock(on_sleep=passed)) == f"job {job} ended; {NOTHING}"
    assert fake.signals == [(int(job), "TERM")] * 3


def test_a_run_that_failed_is_not_marked_as_cancelled(tmp_path: Path) -> None:
    fake = FakeSlurm()
    job = fake.submit("--nodes=2")
    fake.finish(job, code=1)
    assert cancel_job(tmp_path, job, Slurm(fake), FakeClock()) == f"job {job} has ended already; {NOTHING}"
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
    assert cancel_job(tmp_path, job, Slurm(fake), clock) == f"job {job} cancelled; it was waiting; {NOTHING}"
    assert clock.now() == 0


@pytest.mark.parametrize(
    ("limit", "notice", "fits"),
    [("1", 120, False), ("3", 120, False), ("3:01", 120, True), ("2", 55, True), ("0", 120, True), (None, 120, True)],
)
def test_a_time_limit_must_leave_time_before_the_notice(
    tmp_path: Path, kind: Callable[[str], None], limit: str | None, notice: int, fits: bool
) -> None:
    kind("nfs4")
    asked = run(time=limit, save_notice_s=notice)
    if fits:
        assert lines_of(asked, FakeSlurm(), tmp_path) == []
        return
    fake = FakeSlurm()
    fake.away = True  # the run file alone says it
    with pytest.raises(InputError, match=r"cluster\.time: found 00:0\d:00; allowed: more than 00:03:00"):
        lines_of(asked, fake, tmp_path)


def test_the_partitions_own_time_limit_counts_where_none_is_given(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not given, and partition 'low' gives 01:00:00"):
        lines_of(run(save_notice_s=3600), FakeSlurm(), tmp_path)


class Preempting(FakeSlurm):
    """Partition low with another way to preempt its jobs."""

    mode = "CANCEL"
    grace = "0"

    def _partition_lines(self) -> list[str]:
        low, high = super()._partition_lines()
        low = low.replace("GraceTime=20", f"GraceTime={self.grace}")
        return [low.replace("PreemptMode=REQUEUE", f"PreemptMode={self.mode}"), high]


def test_what_a_preemption_costs_is_said_before_submitting(tmp_path: Path, kind: Callable[[str], None]) -> None:
    kind("nfs4")
    fake = Preempting()
    at_once, gone = lines_of(run(), fake, tmp_path)
    assert "cancelled at once (GraceTime 0)" in at_once
    assert "Slurm does not bring a preempted job back (PreemptMode CANCEL)" in gone
    fake.mode = "REQUEUE"
    assert len(lines_of(run(), fake, tmp_path)) == 1
    fake.grace = "20"
    assert lines_of(run(), fake, tmp_path) == []
    # Nobody is above this partition.
    fake.mode = "CANCEL"
    assert lines_of(run(partition="high"), fake, tmp_path) == []


def test_a_job_asks_for_all_gpus_of_its_nodes() -> None:
    for device in ("auto", "cuda"):
        asked, words = with_gpu_request(run(device=device), Slurm(FakeSlurm()).state())
        assert "--gpus-per-node=4" in directives(asked, Path("/shared/run"))
        assert words == ["4 GPUs a node are asked for (all of them)"]
    assert with_gpu_request(run(device="cpu"), Slurm(FakeSlurm()).state()) == (run(device="cpu"), [])
    assert with_gpu_request(run(devices_per_node=2), Slurm(FakeSlurm()).state()) == (run(devices_per_node=2), [])


class Mixed(FakeSlurm):
    """Nodes with 8, 4 and no GPUs."""

    def _node_lines(self) -> list[str]:
        first, second, third = super()._node_lines()
        return [first.replace("a100:4", "a100:8"), second, third.replace("Gres=gpu:a100:4(S:0-1)", "Gres=(null)")]


@pytest.mark.parametrize(("nodes", "count"), [("1", 8), ("2", 4), ("1-3", 8), ("3", None)])
def test_as_many_gpus_are_asked_for_as_so_many_nodes_have(nodes: str, count: int | None) -> None:
    asked, words = with_gpu_request(run(nodes=nodes, device="auto"), Slurm(Mixed()).state())
    assert asked.cluster.devices_per_node == count
    assert bool(words) == (count is not None)
    _, words = with_gpu_request(run(nodes="3", device="cuda"), Slurm(Mixed()).state())
    assert words[0].startswith("cluster.device is cuda, and no GPUs are asked for")
