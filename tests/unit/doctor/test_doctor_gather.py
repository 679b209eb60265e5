"""Facts from commands and from this machine; what is missing is a fact too."""

from __future__ import annotations

import fcntl
import json

import pytest
from fake_slurm import FakeSlurm

from hpctrain.base.errors import CommandError, CommandTimeoutError
from hpctrain.base.process import CommandResult, SystemRunner
from hpctrain.doctor.facts import Driver, SlurmFacts, SlurmUnavailable, TorchFacts, TorchUnavailable
from hpctrain.doctor.inspect import (
    inspect_containers,
    inspect_driver,
    inspect_network,
    inspect_runs_folder,
    inspect_slurm,
    inspect_torch,
)
from hpctrain.slurm.commands import Slurm


class Answers:
    """A runner that answers every command with the same."""

    def __init__(self, code: int = 0, stdout: str = "", stderr: str = "", error: Exception | None = None) -> None:
        self.code, self.stdout, self.stderr, self.error = code, stdout, stderr, error

    def run(self, argv, timeout_s=None, env=None):
        if self.error:
            raise self.error
        return CommandResult(tuple(argv), self.code, self.stdout, self.stderr)


def there(name):
    return f"/usr/bin/{name}"


def absent(name):
    return None


def test_a_cluster():
    found = inspect_slurm(FakeSlurm(), {}, there)
    assert isinstance(found, SlurmFacts)
    assert found.config["version"] == "22.05.8"
    assert [partition.name for partition in found.partitions] == ["low", "high"]
    assert [node.name for node in found.nodes] == ["gpu1", "gpu2", "gpu3"]
    assert not found.pyxis


def test_pyxis_is_seen_by_the_option_that_it_adds():
    assert Slurm(Answers(stdout="  --container-image=[USER@]\n"), {}).srun_has("--container-image")


def test_no_cluster():
    assert inspect_slurm(Answers(), {}, absent) == SlurmUnavailable(False, False)
    fake = FakeSlurm()
    fake.away = True
    away = inspect_slurm(fake, {}, there)
    assert (away.installed, away.configured) == (True, True)
    assert "controller is away" in away.reason
    assert len(fake.argvs) == 1
    text = "scontrol: fatal: Could not establish a configuration source\n"
    assert inspect_slurm(Answers(1, stderr=text), {}, there).configured is False


def test_containers_are_asked_for_their_version():
    found = inspect_containers(
        Answers(stdout="apptainer version 1.3.0\n"), lambda name: name if name[0] == "a" else None
    )
    assert found == {"apptainer": "apptainer version 1.3.0"}
    assert list(inspect_containers(Answers(code=255), there).values()) == [None, None]
    assert inspect_containers(Answers(), absent) == {}


def test_torch_answers_from_a_process_of_its_own():
    state = {"version": "2.13.0", "cuda_version": "12.9", "gloo": True, "nccl_version": "2.27.3", "devices": ["H200"]}
    found = inspect_torch(Answers(stdout=f"a library says hello\n{json.dumps(state)}\n"))
    assert found == TorchFacts("2.13.0", "12.9", True, "2.27.3", ("H200",))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (Answers(1, stderr="Traceback\nImportError: libcudart.so.12: cannot open\n"), "libcudart.so.12"),
        (Answers(-11), "exit code -11"),
        (Answers(error=CommandTimeoutError("python: no answer after 180 s")), "no answer after 180 s"),
    ],
)
def test_a_torch_that_does_not_load_is_a_fact(answers, words):
    found = inspect_torch(answers)
    assert isinstance(found, TorchUnavailable)
    assert found.installed
    assert words in found.reason


@pytest.mark.slow
def test_the_torch_of_this_machine():
    found = inspect_torch(SystemRunner())
    assert isinstance(found, TorchFacts)
    assert found.gloo
    assert (found.nccl_version is None) == (found.cuda_version is None)


def test_the_driver():
    rows = "NVIDIA H200, 570.86.15\nNVIDIA H200, 570.86.15\n"
    assert inspect_driver(Answers(stdout=rows), there) == Driver(("NVIDIA H200", "NVIDIA H200"), "570.86.15")
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    assert inspect_driver(Answers(9, stdout=said), there).reason == said.strip()
    assert inspect_driver(Answers(error=CommandError("nvidia-smi: not found")), there).reason
    assert inspect_driver(Answers(), absent) is None


def test_a_run_on_this_machine_uses_loopback():
    found = inspect_network([], "here", {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": ""})
    assert (found.peer, found.chosen) == (None, "lo")
    assert found.exported == {"NCCL_SOCKET_IFNAME": "ib0"}
    assert "lo" in found.known
    assert "lo" not in [entry.name for entry in found.interfaces]


def test_a_node_that_only_loopback_leads_to_gives_no_interface():
    fake = FakeSlurm(nodes=("localhost",))
    found = inspect_network(Slurm(fake, {}).nodes(), "login1", {})
    assert (found.peer, found.chosen) == ("localhost", None)
    assert "only loopback" in found.reason
    assert "--addr" not in found.reason


def test_a_folder_is_tried_and_left_as_it_was(tmp_path):
    found = inspect_runs_folder(tmp_path / "not" / "yet", {})
    assert (found.rename, found.lock, found.link) == ("", "", "")
    assert not found.from_variable
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "runs").write_text("")
    found = inspect_runs_folder(tmp_path / "runs", {"HPCTRAIN_RUNS": str(tmp_path / "runs")})
    assert found.from_variable
    assert found.rename == "it is a file, not a folder"


def test_a_file_system_without_locks_is_noticed(tmp_path, monkeypatch):
    def refuse(descriptor, kind):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    found = inspect_runs_folder(tmp_path, {})
    assert found.lock == "Function not implemented"
    assert (found.rename, list(tmp_path.iterdir())) == ("", [])


def test_locks_that_hold_nothing_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, kind: None)
    assert inspect_runs_folder(tmp_path, {}).lock == "a lock that is held looks free"


def test_a_folder_that_nobody_may_write(tmp_path, monkeypatch):
    def refuse(**given):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("hpctrain.doctor.inspect.tempfile.mkdtemp", refuse)
    found = inspect_runs_folder(tmp_path, {})
    assert found.rename == found.link == "nothing can be written there: Permission denied"
