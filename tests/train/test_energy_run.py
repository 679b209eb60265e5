"""A run whose machine has counters of energy, and a process that moves them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from train_site import Site

from hpctrain.probe.system.powercap import POWERCAP
from hpctrain.records.history.node_log import read_node_log
from tests.fakes.powercap import FakePowercap

pytestmark = pytest.mark.slow


def test_status_says_what_a_run_on_two_virtual_nodes_of_one_machine_used(site: Site, tmp_path: Path) -> None:
    machine, over, used_j = FakePowercap(tmp_path), threading.Event(), 0.0
    machine.add("intel-rapl:0", "package-0", 262_143_000_000)
    machine.add("intel-rapl:0:0", "dram")

    def move() -> None:
        nonlocal used_j
        while not over.wait(0.02):
            machine.use("intel-rapl:0", 3.0)
            machine.use("intel-rapl:0:0", 1.0)
            used_j += 4.0

    thread = threading.Thread(target=move)
    thread.start()
    try:
        done = site.train(
            "run.yaml", "--local", "2", "--topology", "four.json", "--set", "steps=40", "--set", "energy.every_s=0.2",
            "--set", "energy.carbon_intensity=360", env={POWERCAP: str(tmp_path)},
        )  # fmt: skip
    finally:
        over.set()
        thread.join()
    assert done.code == 0, done.said
    assert done.folder is not None
    rows = read_node_log(done.folder)
    assert {row.node for row in rows} == {"local0", "local1"}
    assert len({row.machine for row in rows}) == 1
    one = sum(sum((row.cpu_j or {}).values()) for row in rows if row.node == "local0")
    energy = json.loads(site.command("status", str(done.folder), "--json").stdout)["energy"]
    assert 0 < one <= used_j
    # Both nodes counted it all, and it counts once. Where their rows overlap, power counts as constant, which that of a
    # busy machine is not.
    assert 0.5 * one <= energy["total_j"] <= 1.5 * used_j
    assert sum(sum((row.cpu_j or {}).values()) for row in rows) > 1.5 * one
    assert 0 < energy["steps_j"] <= energy["total_j"]
    assert energy["carbon_g"] == pytest.approx(energy["total_j"] / 1e4)
    assert energy["step_j"] == pytest.approx(energy["token_j"] * 8 * 64)
    assert "gpu_j" not in energy
    assert "/step" in site.command("status", str(done.folder)).stdout


def test_a_run_whose_machine_has_no_counters_says_nothing(site: Site, tmp_path: Path) -> None:
    done = site.train("run.yaml", "--local", "1", "--topology", "one.json", env={POWERCAP: str(tmp_path)})
    assert done.code == 0, done.said
    assert done.folder is not None
    assert "energy" not in json.loads(site.command("status", str(done.folder), "--json").stdout)
    assert not (done.folder / "metrics-nodes.jsonl").exists()
