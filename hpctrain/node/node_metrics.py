"""Records the energy of a node and the state of its GPUs while the node trains: lines of metrics-nodes.jsonl, and an
event for each problem of a GPU. A thread of its own does this; an error in it does not disturb the run."""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.agent.event_log import EventLog
from hpctrain.base.atomic import append_line
from hpctrain.base.clock import Clock, SystemClock
from hpctrain.base.errors import HpctrainError, StorageError
from hpctrain.base.helper_thread import HelperThread
from hpctrain.base.system.kernel import kernel_text
from hpctrain.node.gpu_health import GpuHealth, GpuProblem
from hpctrain.probe.system.gpu import Gpu, gpu_at, open_nvml
from hpctrain.probe.system.powercap import GAP_S, RaplCounters
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.node_log import NODE_LOG, GpuFigures, NodeRow
from hpctrain.records.topology.topology import Node
from hpctrain.runs.folder import RunFolder

SAMPLE_S = 2.0
"""Longest time between two readings, in seconds."""
LINES = 4000
"""Lines that all nodes together write in the time in which a run becomes e times as old, if each of them writes more
than `LEAST_LINES`."""
LEAST_LINES = 20
"""Fewest lines of a node in that time."""
END_S = 2.0
"""Seconds for which the end of `recorded_node_metrics` waits for the last line."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def line_interval_s(every_s: float, nodes: int, age_s: float) -> float:
    """Return the seconds between two lines of a node: `every_s` at first, and more in an old run and on many nodes, so
    that the file of a run of 1,000 nodes and 30 days has about 200,000 lines.

    Args:
        every_s: `energy.every_s` of the run file.
        nodes: number of the attempt's nodes.
        age_s: seconds since the run's first attempt began.
    """
    return max(every_s, age_s / max(LEAST_LINES, LINES / nodes))


@contextlib.contextmanager
def recorded_node_metrics(
    folder: Path, node: Node, attempt: int, nodes: int, every_s: float, event_log: EventLog
) -> Iterator[None]:
    """Record the node's energy and the health of its GPUs during the `with` block.

    Args:
        folder: the run folder.
        node: the node as the probe found it.
        nodes: number of the attempt's nodes.
        every_s: `energy.every_s` of the run file.
        event_log: gets the problems of GPUs.
    """
    stop, thread, clock = threading.Event(), HelperThread("node metrics"), SystemClock()

    def record() -> None:
        try:
            with open_nvml(), NodeMetrics(folder, node, attempt, nodes, every_s, event_log, clock) as metrics:
                while not stop.wait(metrics.sample_s):
                    metrics.sample()
        except Exception as error:
            print(f"no longer recorded: the energy and GPUs of {node.id} ({error})", flush=True)

    future = thread.submit(record)
    try:
        yield
    finally:
        stop.set()
        wait([future], END_S)
        thread.shutdown()


class NodeMetrics:
    """The readings of one node in one attempt, and their lines. NVML has to be open (`open_nvml`). At the end of the
    `with` block, the last line is written."""

    def __init__(
        self, folder: Path, node: Node, attempt: int, nodes: int, every_s: float, event_log: EventLog, clock: Clock
    ) -> None:
        """Prepare to record. The arguments are those of `recorded_node_metrics`."""
        self.sample_s = min(SAMPLE_S, every_s / 2)
        """Seconds between two calls of `sample`."""
        self._path, self._node, self._attempt, self._nodes, self._every_s = folder, node.id, attempt, nodes, every_s
        self._event_log, self._clock = event_log, clock
        self._machine = kernel_text(_BOOT_ID) or node.id
        self._begun_s = _first_start(folder, clock.wall())
        self._rapl = RaplCounters()
        self._cpu_j: list[Mapping[str, float]] = []
        self._gpus: list[_GpuReadings] = []
        self._node_devices = node.devices
        self._open = contextlib.ExitStack()
        self._start = clock.now(), clock.wall()

    def __enter__(self) -> NodeMetrics:
        for device in self._node_devices:
            gpu = gpu_at(device.pci_path[-1]) if device.pci_path and device.id.startswith("cuda") else None
            if gpu is not None and device.pci_path:
                take_xids = self._open.enter_context(gpu.watched_for_xid())
                name = DeviceId.of(self._node, device.id)
                self._gpus.append(_GpuReadings(gpu, device.pci_path[-1], GpuHealth(name), take_xids))
        self._read(self._clock.now())
        self._cpu_j = []
        return self

    def __exit__(self, *error: object) -> None:
        with self._open:
            self.sample(end=True)

    def sample(self, end: bool = False) -> None:
        """Read everything once; write a line if one is due, or at the `end`."""
        now = self._clock.now()
        self._read(now)
        age_s = self._clock.wall() - self._begun_s
        if end or now - self._start[0] >= line_interval_s(self._every_s, self._nodes, age_s):
            self._write()

    def _read(self, now: float) -> None:
        self._cpu_j.append(self._rapl.take(now))
        for readings in self._gpus:
            for problem in readings.read(now):
                self._event_log.write("gpu_unhealthy", self._event_log.generation, problem.reason, **problem.data)

    def _write(self) -> None:
        """Append a line about the time since the last one, if there is anything to say. If it cannot be written, the
        next line includes its time."""
        now, wall = self._clock.now(), self._clock.wall()
        seconds = now - self._start[0]
        if abs(wall - self._start[1] - seconds) < 1.0:
            seconds = wall - self._start[1]  # so that lines have no gaps; unless somebody has set the machine's clock
        domains = set.intersection(*(set(taken) for taken in self._cpu_j)) if self._cpu_j else set()
        cpu_j = {name: round(sum(taken[name] for taken in self._cpu_j), 3) for name in sorted(domains)}
        gpus = [figures for readings in self._gpus if (figures := readings.figures()) is not None]
        if seconds > 0 and (cpu_j or gpus):
            row = NodeRow(
                time_s=round(wall, 3), seconds=max(0.001, round(seconds, 3)), attempt=self._attempt, node=self._node,
                machine=self._machine, cpu_j=cpu_j or None, gpus=gpus or None,
            )  # fmt: skip
            try:
                append_line(self._path / NODE_LOG, json.dumps(row.to_json(), allow_nan=False))
            except StorageError:
                return
        self._start, self._cpu_j = (now, wall), []
        for readings in self._gpus:
            readings.begin()


@dataclass
class _GpuReadings:
    """The readings of one GPU since the last line."""

    gpu: Gpu
    address: str
    health: GpuHealth
    take_xids: Callable[[], list[int]]
    _counter_j: float | None = None
    _watts: float | None = None
    _read_s: float | None = None
    _joules: list[float | None] = field(default_factory=list)
    _figures: dict[str, list[float]] = field(default_factory=dict)
    _reasons: set[str] = field(default_factory=set)
    _xids: list[int] = field(default_factory=list)
    _ecc: dict[str, int | None] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin a new line."""
        self._joules, self._figures, self._reasons, self._xids = [], {}, set(), []

    def read(self, now_s: float) -> Sequence[GpuProblem]:
        """Read the GPU; return the problems that show for the first time.

        Args:
            now_s: a monotonic time in seconds.
        """
        watts, reasons, xids = self.gpu.power_w(), self.gpu.throttle_reasons(), self.take_xids()
        figures = {
            "power_w": watts, "use": self.gpu.use(), "temperature_c": self.gpu.temperature_c(),
            "sm_clock_hz": self.gpu.clock_hz(), "memory_clock_hz": self.gpu.clock_hz(of_memory=True),
        }  # fmt: skip
        for name, value in figures.items():
            if value is not None:
                self._figures.setdefault(name, []).append(value)
        self._ecc = {
            "ecc_corrected": self.gpu.ecc_errors(corrected=True),
            "ecc_uncorrected": (uncorrected := self.gpu.ecc_errors()),
        }
        self._add_energy(now_s, self.gpu.energy_j(), watts)
        self._reasons |= set(reasons)
        self._xids += xids
        return self.health.judge(now_s, reasons, uncorrected, xids, figures["temperature_c"])

    def _add_energy(self, now_s: float, counter_j: float | None, watts: float | None) -> None:
        """Add the energy since the last reading: by the counter, else by the mean of two readings of the power."""
        if self._read_s is not None:
            seconds, joules = now_s - self._read_s, None
            if counter_j is not None and self._counter_j is not None and counter_j >= self._counter_j:
                joules = counter_j - self._counter_j
            elif watts is not None and self._watts is not None and seconds <= GAP_S:
                joules = (watts + self._watts) / 2 * seconds
            self._joules.append(joules)
        self._read_s, self._counter_j, self._watts = now_s, counter_j, watts

    def figures(self) -> GpuFigures | None:
        """Return the GPU's figures for a line of metrics-nodes.jsonl; None if the driver gives none."""
        known = [joules for joules in self._joules if joules is not None]
        energy_j = round(sum(known), 3) if known and len(known) == len(self._joules) else None
        if energy_j is None and not self._figures and not self._xids and set(self._ecc.values()) <= {None}:
            return None
        means = {name: statistics.fmean(values) for name, values in self._figures.items()}
        if "temperature_c" in means:
            means["temperature_c"] = max(self._figures["temperature_c"])
        return GpuFigures(
            device=self.health.device.device, address=self.address, energy_j=energy_j,
            throttle_reasons=sorted(self._reasons) or None, xids=self._xids or None, **self._ecc,
            **{name: round(value, 3) for name, value in means.items()},
        )  # fmt: skip


def _first_start(folder: Path, default: float) -> float:
    """Return when the run's first attempt began, in seconds since 1970; `default` if that is not known."""
    with contextlib.suppress(HpctrainError, OSError):
        for line in RunFolder(folder).attempts()[:1]:
            start = line.get("start")
            if isinstance(start, int | float):
                return float(start)
    return default
