"""The power of devices by type, as runs and probes measured it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.planner.devices.power import probed_watts, run_watts, trained_watts
from hpctrain.records.history.node_log import NODE_LOG, GpuFigures, NodeRow
from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology


def topology(**devices: list[Device]) -> Topology:
    types = {device.type: DeviceType(kind="cuda", name=device.type) for each in devices.values() for device in each}
    return Topology(
        provenance=Provenance(version="0", created="2026-01-01T00:00:00Z", transport="tcp"),
        device_types=types,
        nodes=[Node(id=name, addr="127.0.0.1", devices=each) for name, each in devices.items()],
        fabric=Fabric(classes=[LinkClass(id="tcp", alpha_s=4e-5, beta_s_per_byte=5e-10, pairs=1)]),
    )


def row(node: str, end_s: float = 10.0, **fields: Any) -> NodeRow:
    return NodeRow(time_s=end_s, node=node, **({"seconds": 10.0, "attempt": 0, "machine": node} | fields))


def gpu(device: str, energy_j: float | None) -> GpuFigures:
    return GpuFigures(device=device, address=f"0000:{device[-1]}e:00.0", energy_j=energy_j)


MIXED = topology(
    n0=[Device(id="cuda0", type="a100", power_w=380.0), Device(id="cuda1", type="a100", power_w=400.0)],
    n1=[Device(id="cuda0", type="h100", power_w=650.0), Device(id="cuda1", type="h100")],
    n2=[Device(id="cpu0", type="cpu"), Device(id="cpu1", type="cpu")],
    n3=[Device(id="cpu0", type="cpu")],
)


def test_the_power_under_the_probes_load() -> None:
    assert probed_watts(MIXED) == {"a100": 390.0, "h100": 650.0}


def test_the_power_while_a_run_trained() -> None:
    rows = [
        row("n0", gpus=[gpu("cuda0", 3000.0), gpu("cuda1", 5000.0)], cpu_j={"package-0": 900.0}),
        row("n1", gpus=[gpu("cuda0", 6000.0), gpu("cuda1", None)]),
        row("n2", cpu_j={"package-0": 500.0, "dram-0": 100.0}, machine="m"),
        row("n3", cpu_j={"package-0": 500.0, "dram-0": 100.0}, machine="m"),
        row("gone", cpu_j={"package-0": 1e6}),
    ]
    assert trained_watts(rows, [], MIXED) == {"a100": 400.0, "h100": 600.0, "cpu": 20.0}
    assert trained_watts([row("n2")], [], MIXED) == {}


def test_a_run_folder_without_energy_gives_no_power(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert run_watts(tmp_path) == {}
    MIXED.write(tmp_path / "topology.json")
    (tmp_path / NODE_LOG).write_text(json.dumps(row("n3", cpu_j={"package-0": 50.0}).to_json()) + "\n")
    assert run_watts(tmp_path) == {"cpu": pytest.approx(5.0)}
