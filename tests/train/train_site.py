"""Runs of the real command on small text, and faults for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import forked_python
import psutil
from forked_python import ForkedCommand

from hpctrain.base.process import WORKER_NAME
from hpctrain.records.history.run_log import Event, MetricRow, last_row_of_each_step, read_events, read_metrics
from hpctrain.records.plan.plan import Plan, Replica, Stage
from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology

CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
"""On a machine with GPUs, too, these runs are compared with figures of a CPU."""
PATIENCE = 5
"""Limits of waits only end a hang: they count so many times, for machines with other work."""
HELD = Path(__file__).with_name("held")

RUN = {
    "name": "test",
    "steps": 24,
    "seed": 3,
    "model": {"dims": {"layers": 4, "dim": 64, "heads": 4}},
    "data": {"train": ["data"], "seq_len": 64},
    "batch": {"global": 8},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"every": 8, "keep": 3},
    "validation": {"every": 12, "batches": 1},
    "adapt": {"mode": "off"},  # measured times of a busy machine change no plan
}


@dataclass
class Site:
    """A folder with a prepared corpus and a run file, and the commands a person would type in it."""

    path: Path

    def command(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run hpctrain to its end."""
        return forked_python.run(arguments, self.path, {**os.environ, **CPU_ONLY, **(env or {})})

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> ForkedCommand:
        """Start hpctrain and come back at once."""
        argv = [sys.executable, "-m", "hpctrain", *arguments]
        return ForkedCommand(argv, self.path, {**os.environ, **CPU_ONLY, **(env or {})}, merged=True)

    def train(self, *arguments: str, env: dict[str, str] | None = None) -> Outcome:
        """`hpctrain train … --json` to its end."""
        done = self.command("train", *arguments, "--json", env=env)
        folder = Path(json.loads(done.stdout)["folder"]) if done.stdout.strip() else None
        return Outcome(done.returncode, folder, done.stderr)

    def run_folder(self, known: set[Path]) -> Path:
        """The run folder that was not there before. On a busy machine the command takes a while to make it."""

        def new() -> set[Path]:
            return set((self.path / "runs").glob("*")) - known

        wait_for(lambda: bool(new()), 180, "a run folder")
        return new().pop().resolve()


@dataclass
class Gate:
    """Holds the workers of a run's first generation before a step until it is opened."""

    file: Path
    before: int

    @property
    def env(self) -> dict[str, str]:
        """Environment of the command that starts the run."""
        return {"PYTHONPATH": str(HELD), "HELD_BEFORE": str(self.before), "GATE": str(self.file)}

    def open(self) -> None:
        self.file.touch()


@dataclass
class Outcome:
    """An ended run."""

    code: int
    folder: Path | None
    said: str

    @property
    def rows(self) -> list[MetricRow]:
        assert self.folder is not None, self.said
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def events(self) -> list[Event]:
        assert self.folder is not None, self.said
        return read_events(self.folder / "events.jsonl")

    def losses(self) -> list[float]:
        return [row.loss for row in last_row_of_each_step(self.rows)]


def small_topology(count: int) -> Topology:
    """A topology of virtual nodes as a probe would write it, for runs that need not measure."""
    device = Device(
        id="cpu0", type="cpu", flops={"fp32": 3e10}, memory_bytes=4e9, memory_bytes_per_s=5e9, launch_s=2e-6
    )
    return Topology(
        provenance=Provenance(version="0", created="2099-01-01T00:00:00Z", transport="tcp", loopback=True),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=f"local{i}", addr="127.0.0.1", devices=[device]) for i in range(count)],
        fabric=Fabric(classes=[LinkClass(id="loopback", alpha_s=4e-5, beta_s_per_byte=5e-10, pairs=6)]),
    )


def four_node_plan() -> Plan:
    """Written by hand as a person would edit it: an uneven cut, turned devices and ranks, unequal micro-batches."""
    return Plan(
        pp=2,
        dp=2,
        tp=1,
        schedule="1f1b",
        stages=[Stage(layers=(0, 3)), Stage(layers=(3, 4))],
        replicas=[
            Replica(sequences=6, micro_batch=2, micro_batches=3, devices=[["local3:cpu0"], ["local0:cpu0"]]),
            Replica(sequences=2, micro_batch=1, micro_batches=2, devices=[["local1:cpu0"], ["local2:cpu0"]]),
        ],
        ranks=["local2:cpu0", "local3:cpu0", "local0:cpu0", "local1:cpu0"],
    )


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Return when the condition holds; fail with its name when it does not within PATIENCE times so many seconds."""
    deadline = time.monotonic() + PATIENCE * seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"waited {PATIENCE * seconds:g} s in vain: {what}")


def wait_for_step(folder: Path, step: int, generation: int = 0) -> None:
    """Return when the run has done that step in that generation."""
    path = folder / "metrics.jsonl"
    wait_for(
        lambda: any(row.step >= step and row.generation >= generation for row in read_metrics(path)),
        120, f"step {step} of generation {generation}",
    )  # fmt: skip


def node_process(folder: Path, node: str) -> psutil.Process:
    """The agent process of a virtual node of that run."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "hpctrain.node" in line and str(folder) in line and line[line.index("--node") + 1] == node:
            return process
    raise AssertionError(f"no process of {node}")


def processes_of(folder: Path) -> list[psutil.Process]:
    """Agents and workers of that run."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if str(folder) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def worker_of(folder: Path, node: str) -> psutil.Process:
    """The worker of a node with one device."""
    (worker,) = (
        child for child in node_process(folder, node).children() if child.name().startswith(WORKER_NAME.format(""))
    )
    return worker


def once_there(lookup: Callable[[Path, str], psutil.Process], folder: Path, node: str) -> psutil.Process:
    """`worker_of` or `node_process` as soon as it finds one: long before the first step of a short run."""
    deadline = time.monotonic() + PATIENCE * 120
    while True:
        try:
            return lookup(folder, node)
        except (AssertionError, ValueError, psutil.Error):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def kill_worker(folder: Path, node: str) -> None:
    """SIGKILL the worker of a node, agent untouched."""
    worker_of(folder, node).send_signal(signal.SIGKILL)


def kill_node(folder: Path, node: str) -> None:
    """SIGKILL the agent of a node; its worker ends by itself when the agent is gone."""
    node_process(folder, node).send_signal(signal.SIGKILL)
