"""Each node records its software; another hpctrain than the attempt began with is refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain import __version__
from hpctrain.base.clock import SystemClock
from hpctrain.base.process import SystemRunner
from hpctrain.node import environment, run
from hpctrain.node.environment import MachineFiles, describe_changes, gpu_facts, network_versions, record_environment
from hpctrain.records.history.provenance import read_environments
from hpctrain.records.history.run_log import read_events
from hpctrain.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    (path / "checkpoints").mkdir()
    for number in range(2):
        (path / "logs" / str(number)).mkdir(parents=True)
    return path


def test_a_node_with_another_hpctrain_is_refused_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run file is not looked at: another version may not understand it."""
    monkeypatch.setattr(run._StopRequest, "listen", lambda self: None)
    RunFolder(folder).begin_attempt(["a", "b"], 1.0)
    attempts = folder / "attempts.jsonl"
    attempts.write_text(attempts.read_text().replace(f'"hpctrain": "{__version__}"', '"hpctrain": "0.0.9"'))
    words = ["--folder", str(folder), "--attempt", "0", "--nodes", "a,b", "--addr", "127.0.0.1", "--node", "b"]
    assert run.main(words) == 4
    (event,) = read_events(folder / "events.jsonl")
    assert (event.kind, event.data) == ("failed", {"exit_code": 4})
    assert event.reason.startswith(f"b has hpctrain {__version__}, and attempt 0 began with 0.0.9: allowed is one")
    # The job script waits for nobody else.
    assert (folder / "left" / "0.code").exists()


def test_no_error_in_the_record_of_software_ends_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "record_environment", lambda *_: [].get("a"))  # type: ignore[attr-defined]
    run._record_environment(run.AgentIdentity("a", ("a",), "127.0.0.1", "0", 0, folder))
    assert capsys.readouterr().out.startswith("not recorded: the software of a (")


def test_the_first_node_writes_what_is_needed_to_install_it_again(folder: Path) -> None:
    for node in ("a", "b"):
        record_environment(folder, 0, node, node == "a", SystemRunner(), SystemClock(), {"LOADEDMODULES": "gcc/12"})
    first, second = read_environments(folder)
    assert first.software.torch == second.software.torch is not None
    assert first.software.modules == ["gcc/12"]
    assert first.packages is not None
    assert second.packages is None
    lock = (folder / "requirements.lock").read_text()
    assert f"torch=={first.software.torch}" in lock.splitlines()
    # As submitted: a later attempt with the same packages writes nothing more, one with others beside its logs.
    record_environment(folder, 1, "a", True, SystemRunner(), SystemClock(), {})
    assert not (folder / "logs" / "1" / "requirements.lock").exists()
    (folder / "requirements.lock").write_text("torch==1.0\n")
    record_environment(folder, 1, "a", True, SystemRunner(), SystemClock(), {})
    assert (folder / "logs" / "1" / "requirements.lock").read_text() == lock


def test_changes_are_told_of_the_attempt_and_of_its_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(attempt: int, node: str) -> None:
        record_environment(folder, attempt, node, node == "a", SystemRunner(), SystemClock(), {})

    record(0, "a")
    record(0, "b")
    assert describe_changes(folder, 0) is None
    monkeypatch.setattr(environment, "gpu_facts", lambda: ("550.2", ["NVIDIA H100"]))
    record(1, "a")
    assert describe_changes(folder, 1) is None, "the first attempt had no driver, so none has changed"
    lines = [json.loads(line) for line in (folder / "environments.jsonl").read_text().splitlines()]
    lines.append(lines[1] | {"attempt": 1, "software": lines[1]["software"] | {"torch": "9.9"}})
    (folder / "environments.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    torch = lines[0]["software"]["torch"]
    told = describe_changes(folder, 1)
    assert told is not None
    assert told[0] == (
        f"changed since attempt 0: torch {torch} → 9.9 on b. not the same on all nodes: torch {torch} on a, 9.9 on b"
    )
    (folder / "environments.jsonl").write_text('{"attempt": "x"}\n')
    assert describe_changes(folder, 1) is None, "a damaged record ends no run"


def test_drivers_gpus_and_network_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat\nGCC version: 1")
    for number in range(2):
        gpu = tmp_path / "gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text("Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ: 1\n")
    device = tmp_path / "sys" / "class" / "infiniband" / "mlx5_0"
    device.mkdir(parents=True)
    (device / "fw_ver").write_text("20.35.1012\n")
    libraries = tmp_path / "lib"
    libraries.mkdir()
    (libraries / "libibverbs.so.1.14.44.0").touch()
    (libraries / "libibverbs.so.1").symlink_to("libibverbs.so.1.14.44.0")
    files = MachineFiles(tmp_path / "version", tmp_path / "gpus", tmp_path / "sys")
    assert gpu_facts(files) == ("535.104.05", ["NVIDIA A100-SXM4-80GB"])
    expected = {"libibverbs": "1.14.44.0", "mlx5_0": "firmware 20.35.1012"}
    assert network_versions({}, [str(libraries)], files) == expected
    nothing = MachineFiles(*[tmp_path / "absent"] * 3)
    assert gpu_facts(nothing) == (None, [])
    assert network_versions({}, [str(tmp_path / "absent")], nothing) == {}
