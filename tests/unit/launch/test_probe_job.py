"""A probe as a Slurm job: what it asks for, and when it is over."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from fake_clock import FakeClock
from fake_slurm import FakeSlurm

from hpctrain.base.errors import StorageError
from hpctrain.base.package_data import package_data_path
from hpctrain.base.process import Process, SystemRunner
from hpctrain.launch.probe import STALL_S, ProbeJob, ProbeRequest, probe_job, srun_command, start_on_nodes
from hpctrain.node import probe as node_probe
from hpctrain.node.probe import add_node_arguments, node_address


class Hanging:
    """srun with a task on a node that died: it waits until it is told to end."""

    pid = 1

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = 143

    def kill(self) -> None:
        self.code = -9

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self.code


class Starting(FakeSlurm):
    """A Slurm that takes srun."""

    def __init__(self) -> None:
        super().__init__()
        self.srun = Hanging()

    def start(self, argv, env=None, log=None, keep_fds=()) -> Process:
        self.argvs.append(tuple(argv))
        return self.srun


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)


def test_a_node_that_dies_after_the_result_keeps_nobody_waiting(tmp_path: Path) -> None:
    text = package_data_path("topology", "laptop-4-nodes.json").read_text()
    fake, clock = Starting(), FakeClock(on_sleep=lambda _: (tmp_path / "topology.json").write_text(text))
    topology = probe_job(ProbeJob(4), tmp_path, fake, clock)
    assert len(topology.nodes) == 4
    assert clock.now() < STALL_S / 10
    assert fake.srun.code == 143


def asked(job: ProbeJob, tmp_path: Path, device: str = "auto") -> tuple[str, ...]:
    (tmp_path / "topology.json").write_text(package_data_path("topology", "laptop-4-nodes.json").read_text())
    fake = Starting()
    probe_job(job, tmp_path, fake, FakeClock(), ProbeRequest(device))
    return fake.argvs[-1]


def test_a_probe_asks_for_the_gpus_of_its_nodes(tmp_path: Path) -> None:
    assert "--gpus-per-node=4" in asked(ProbeJob(2), tmp_path)
    assert "--gpu-bind=none" in asked(ProbeJob(2), tmp_path)
    assert "--gpus-per-node=2" in asked(ProbeJob(2, gpus_per_node=2), tmp_path)
    assert not any(word.startswith("--gpu") for word in asked(ProbeJob(2, gpus_per_node=0), tmp_path))
    assert not any(word.startswith("--gpu") for word in asked(ProbeJob(2), tmp_path, "cpu"))


def test_inside_an_allocation_the_step_is_a_task_on_each_of_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    words = asked(ProbeJob(2), tmp_path)
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--gpus-per-node=8"} <= set(words)
    assert "--exclusive" not in words
    assert "--exclusive" in srun_command(ProbeJob(2), ["x"])


class PartOfNodes(Starting):
    """Its jobs share their nodes with others."""

    def _show(self, argv, what, name):
        done = super()._show(argv, what, name)
        return done if what != "job" else self._reply(argv, done.stdout.rstrip() + " OverSubscribe=OK\n")


def test_a_probe_in_an_allocation_with_a_part_of_its_nodes_tells_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "topology.json").write_text(package_data_path("topology", "laptop-4-nodes.json").read_text())
    for fake, shared in ((PartOfNodes(), True), (Starting(), False)):
        monkeypatch.setenv("SLURM_JOB_ID", fake.submit("-N2"))
        probe_job(ProbeJob(2), tmp_path, fake, FakeClock())
        assert ("--shared" in fake.argvs[-1]) is shared
    monkeypatch.delenv("SLURM_JOB_ID")
    probe_job(ProbeJob(2), tmp_path, PartOfNodes(), FakeClock())
    assert node_probe._settings(node_probe._parser().parse_args(["--folder", "x", "--shared"]), 2).shared


def test_the_nodes_of_a_step_are_fewer_than_those_of_its_allocation() -> None:
    parser = argparse.ArgumentParser()
    add_node_arguments(parser)
    environ = {"SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n1"}
    assert node_address(parser.parse_args([]), environ).nodes == ("n1",)


def test_a_log_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "gone" / "srun.log"
    with pytest.raises(StorageError) as error:
        start_on_nodes(ProbeJob(2, gpus_per_node=0), ["true"], False, SystemRunner(), log)
    assert str(error.value) == f"{log}: cannot write: No such file or directory; make the folder first"
