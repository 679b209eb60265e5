"""What workers are told about GPUs: the allocator's setting, and the data sheets' speed of a plan."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.agent.agent import AgentIdentity
from hpctrain.node import run as node_run
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.topology.topology import Device, DeviceType, Node, Provenance, Topology
from hpctrain.worker.step_metrics import peak_flops_of_plan


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    place = AgentIdentity("a", ("a",), "127.0.0.1", "x", 0, tmp_path)
    monkeypatch.setattr(node_run, "secret_values", lambda run, environ: {})
    return node_run._worker_environment(place, None, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("variable", sorted(node_run.ALLOCATOR_VARIABLES))
def test_the_allocators_setting_is_left_to_whoever_made_one(
    variable: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv(variable, "backend:cudaMallocAsync")
    env = request.getfixturevalue("environment")
    assert {name: env.get(name) for name in node_run.ALLOCATOR_VARIABLES if name in env} == {
        variable: "backend:cudaMallocAsync"
    }


def test_the_allocator_grows_its_segments(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name in node_run.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert request.getfixturevalue("environment")["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("variable", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_the_flight_recorders_size_is_left_to_torch_and_to_whoever_set_one(
    variable: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "50")
    env = request.getfixturevalue("environment")
    assert {name: value for name, value in env.items() if name.endswith("_BUFFER_SIZE")} == {variable: "50"}


def trainer(folder: Path, precision: str, *ranks: str) -> SimpleNamespace:
    return SimpleNamespace(
        folder=folder, run=SimpleNamespace(precision=precision), plan=SimpleNamespace(ranks=list(map(DeviceId, ranks)))
    )


def test_the_peak_of_a_plan_is_the_sum_of_its_gpus_data_sheets(tmp_path: Path) -> None:
    gpus = [Device(id="cuda0", type="h100"), Device(id="cuda1", type="a100"), Device(id="cuda2", type="other")]
    Topology(
        provenance=Provenance(version="0", created="", transport="tcp"),
        device_types={
            "h100": DeviceType(kind="cuda", name="NVIDIA H100 80GB HBM3"),
            "a100": DeviceType(kind="cuda", name="NVIDIA A100-SXM4-80GB"),
            "other": DeviceType(kind="cuda", name="NVIDIA GeForce GTX 1080"),
        },
        nodes=[Node(id="n0", addr="127.0.0.1", devices=gpus)],
    ).write(tmp_path / "topology.json")
    (tmp_path / "topology.json").chmod(0o600)
    peak = peak_flops_of_plan
    assert peak(trainer(tmp_path, "bf16", "n0:cuda0", "n0:cuda1")) == 989e12 + 312e12  # type: ignore[arg-type]
    assert peak(trainer(tmp_path, "fp32", "n0:cuda0")) is None  # type: ignore[arg-type]
    assert peak(trainer(tmp_path, "bf16", "n0:cuda0", "n0:cuda2")) is None  # type: ignore[arg-type]
    assert peak(trainer(tmp_path / "absent", "bf16", "n0:cuda0")) is None  # type: ignore[arg-type]
