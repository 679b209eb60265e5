"""What a node records of its energy and its GPUs while it trains: from folders like the kernel's, and from an NVML
library with recorded answers."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.agent.event_log import EventLog
from hpctrain.node.node_metrics import NodeMetrics, line_interval_s, recorded_node_metrics
from hpctrain.probe.system.gpu import open_nvml
from hpctrain.probe.system.powercap import POWERCAP
from hpctrain.records.history.node_log import NODE_LOG, read_node_log
from hpctrain.records.history.run_log import read_events
from hpctrain.records.run.energy import Energy
from hpctrain.records.topology.topology import Device, Node
from hpctrain.report.energy import run_energy
from tests.fakes.fake_clock import FakeClock
from tests.fakes.fake_nvml import build_nvml, load_nvml
from tests.fakes.powercap import FakePowercap

CPU_NODE = Node(id="n0", addr="10.0.0.1", devices=[Device(id="cpu0", type="cpu")])
GPU_NODE = Node(
    id="n0", addr="10.0.0.1",
    devices=[Device(id="cuda0", type="h100", pci_path=["0000:4e:00.0"]),
             Device(id="cuda1", type="h100", pci_path=["0000:5f:00.0"])],
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePowercap:
    machine = FakePowercap(tmp_path / "powercap")
    monkeypatch.setenv(POWERCAP, str(machine.folder))
    return machine


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    path = build_nvml(tmp_path)
    load_nvml(monkeypatch, path)
    return ctypes.CDLL(path)


@contextmanager
def recording(folder: Path, node: Node, clock: FakeClock, attempt: int = 0) -> Iterator[NodeMetrics]:
    log = EventLog(folder / "events.jsonl", node.id, attempt, clock)
    with open_nvml(), NodeMetrics(folder, node, attempt, 1, 10.0, log, clock) as metrics:
        yield metrics


def test_the_sum_of_the_lines_is_what_was_used(folder: Path, machine: FakePowercap) -> None:
    machine.add("intel-rapl:0", "package-0", 262_143_000_000)
    machine.add("intel-rapl:0:0", "dram")
    clock = FakeClock()
    with recording(folder, CPU_NODE, clock) as metrics:
        for second in range(0, 1000, 2):
            machine.use("intel-rapl:0", 2 * (150 + second / 100))
            machine.use("intel-rapl:0:0", 2 * 30)
            clock.sleep(2)
            metrics.sample()
    rows = read_node_log(folder)
    energy = run_energy(rows, [], Energy())
    assert energy is not None
    assert energy.total_j == pytest.approx(1000 * (150 + 4.99 + 30), rel=0.001)
    assert (energy.gpu_j, rows[0].gpus) == (None, None)
    assert energy.node_hours == pytest.approx(1000 / 3600, rel=0.001)
    assert len(rows) < 102


def test_a_counter_that_vanishes_and_a_node_that_comes_back(folder: Path, machine: FakePowercap) -> None:
    machine.add("intel-rapl:0", "package-0")
    clock = FakeClock()

    def train(metrics: NodeMetrics, seconds: int) -> None:
        for _ in range(seconds):
            machine.use("intel-rapl:0", 100.0)
            clock.sleep(1)
            metrics.sample()

    with recording(folder, CPU_NODE, clock) as metrics:
        train(metrics, 20)
        (machine.folder / "intel-rapl:0").rename(machine.folder / "away")
        clock.sleep(30)
        metrics.sample()
        (machine.folder / "away").rename(machine.folder / "intel-rapl:0")
        metrics.sample()
        clock.sleep(10)
        metrics.sample()
        train(metrics, 20)
    clock.sleep(500)
    machine.use("intel-rapl:0", 50_000)
    with recording(folder, CPU_NODE, clock, attempt=1) as metrics:
        train(metrics, 15)
    rows = read_node_log(folder)
    energy = run_energy(rows, [], Energy())
    assert energy is not None
    assert energy.total_j == pytest.approx(5500.0)
    assert [row.attempt for row in rows] == [0] * (len(rows) - 2) + [1, 1]


def test_where_nothing_can_be_read_there_is_no_file(folder: Path, machine: FakePowercap) -> None:
    clock = FakeClock()
    with recording(folder, GPU_NODE, clock) as metrics:
        for _ in range(20):
            clock.sleep(2)
            metrics.sample()
    assert [path.name for path in folder.iterdir()] == []


def test_figures_of_gpus(folder: Path, machine: FakePowercap, library: ctypes.CDLL) -> None:
    clock, counter_mj = FakeClock(), 5_000_000_000_000
    library.set_energy.argtypes = (ctypes.c_ulonglong, ctypes.c_int)
    library.set_health(ctypes.c_ulonglong(0), ctypes.c_ulonglong(7))
    with recording(folder, GPU_NODE, clock) as metrics:
        for turn in range(10):
            counter_mj += 2 * 600_000
            library.set_energy(counter_mj, turn != 7)  # once the counter cannot be read
            clock.sleep(2)
            metrics.sample()
    rows = read_node_log(folder)
    first, second = rows[0].gpus or []
    assert first.energy_j == pytest.approx(6000.0)
    assert (first.use, first.temperature_c, first.sm_clock_hz, first.memory_clock_hz) == (0.87, 83, 1.755e9, 2.619e9)
    assert (first.ecc_corrected, first.ecc_uncorrected, first.xids) == (3, 7, [31, 79])
    assert rows[0].device_id(first) == "n0:cuda0"
    assert second.energy_j == pytest.approx(4312.5)  # by its power
    assert (second.use, second.ecc_uncorrected, second.throttle_reasons) == (None, None, None)
    again, _ = rows[1].gpus or []
    assert again.energy_j == pytest.approx(3 * 1200 + 2 * 862.5)
    assert again.xids is None


def test_a_gpu_that_is_not_well_is_an_event_with_what_to_do(
    folder: Path, machine: FakePowercap, library: ctypes.CDLL
) -> None:
    clock = FakeClock()
    library.set_health(ctypes.c_ulonglong(0), ctypes.c_ulonglong(7))

    def sample(metrics: NodeMetrics, seconds: int) -> None:
        for _ in range(seconds):
            clock.sleep(1)
            metrics.sample()

    with recording(folder, GPU_NODE, clock) as metrics:
        library.set_health(ctypes.c_ulonglong(0x40 | 0x4), ctypes.c_ulonglong(7))
        sample(metrics, 20)
        library.set_health(ctypes.c_ulonglong(0x4), ctypes.c_ulonglong(7))  # a power cap is normal
        sample(metrics, 60)
        library.set_health(ctypes.c_ulonglong(0x40), ctypes.c_ulonglong(9))
        library.add_xid(ctypes.c_ulonglong(1234))
        sample(metrics, 90)
    events = read_events(folder / "events.jsonl")
    assert {event.kind for event in events} == {"gpu_unhealthy"}
    assert [(event.data["device"], event.data["problem"]) for event in events] == [
        ("cuda0", "xid"), ("cuda0", "xid"), ("cuda0", "xid"), ("cuda0", "ecc"), ("cuda0", "throttled"),
    ]  # fmt: skip
    assert [event.data.get("xid") for event in events] == [31, 79, 1234, None, None]
    exclude = "`hpctrain resubmit RUN --set cluster.exclude=n0`"
    assert "mostly an error of the program" in events[0].reason
    assert exclude in events[1].reason
    assert "look it up" in events[2].reason
    assert events[3].reason.startswith("n0:cuda0: 2 uncorrectable memory errors, so results may be wrong; ")
    assert events[4].data["reasons"] == ["hw_thermal_slowdown"]
    assert "at 83 °C" in events[4].reason


def test_a_line_that_cannot_be_written_is_part_of_the_next(folder: Path, machine: FakePowercap) -> None:
    machine.add("intel-rapl:0", "package-0")
    clock = FakeClock()
    (folder / NODE_LOG).mkdir()
    with recording(folder, CPU_NODE, clock) as metrics:
        for second in range(30):
            machine.use("intel-rapl:0", 10.0)
            clock.sleep(1)
            metrics.sample()
            if second == 24:
                (folder / NODE_LOG).rmdir()
    rows = read_node_log(folder)
    assert rows[0].seconds == pytest.approx(26.0)
    assert sum((row.cpu_j or {})["package-0"] for row in rows) == pytest.approx(300.0)


def test_it_records_in_a_thread_whose_errors_end_nothing(
    folder: Path, machine: FakePowercap, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.add("intel-rapl:0", "package-0")
    log = EventLog(folder / "events.jsonl", "n0", 0, FakeClock())
    with recorded_node_metrics(folder, CPU_NODE, 0, 1, 0.2, log):
        machine.use("intel-rapl:0", 0.5)
    assert json.loads((folder / NODE_LOG).read_text())["node"] == "n0"
    broken = CPU_NODE.model_copy(update={"devices": None})
    with recorded_node_metrics(folder, broken, 0, 1, 0.2, log):
        pass
    assert "no longer recorded: the energy and GPUs of n0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("nodes", "age_s", "interval_s"),
    [(1, 0, 10), (1, 40_000, 10), (8, 3600, 10), (8, 86_400, 172.8), (1000, 3600, 180), (1000, -5, 10)],
)
def test_lines_are_further_apart_in_old_and_large_runs(nodes: int, age_s: float, interval_s: float) -> None:
    assert line_interval_s(10.0, nodes, age_s) == interval_s
