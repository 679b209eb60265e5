"""A run folder made with the record models, as a run of 4 virtual nodes with one fault leaves it behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.atomic import append_line, write_json
from hpctrain.records.history.run_log import BytesSent, Event, MetricRow, RankPlacement
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import GroupCodec, Mixed
from hpctrain.records.plan.plan import Plan, Replica, Stage
from hpctrain.records.plan.prediction import Predicted, Rejected
from hpctrain.records.topology.link import Latency, Link, LinkFigures
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Health, Node, Provenance, Reason, Topology

START_S = 1_760_000_000.0

RUN = {
    "schema": "hpctrain.run/v1",
    "name": "fable",
    "steps": 40,
    "model": {"preset": "tiny-1m"},
    "data": {"train": ["/data/tokens"], "seq_len": 128},
    "batch": {"global": 16},
}


def event(kind: str, at: float, generation: int = 0, reason: str = "", **data: Any) -> Event:
    """An event `at` seconds after the start."""
    return Event(
        kind=kind,  # type: ignore[arg-type]
        time_s=START_S + at,
        attempt=0,
        generation=generation,
        node="local0",
        reason=reason,
        data=data,
    )


def row(step: int, at: float, generation: int = 0, step_time_s: float = 0.5, **more: Any) -> MetricRow:
    """A step that ended `at` seconds after the start."""
    values: dict[str, Any] = {
        "step": step,
        "generation": generation,
        "time_s": START_S + at,
        "step_time_s": step_time_s,
        "loss": 8.0 * math.exp(-step / 30) + 0.1 * math.sin(step),
        "lr": 1e-4,
        "grad_norm": 1.0,
        "tokens": 2048,
        "samples": 16 * step,
        "tokens_per_s": 2048 / step_time_s,
        "bytes_sent": BytesSent(dp=2_000_000, pp=500_000),
        "stage_time_s": [0.2 * step_time_s / 0.5, 0.25 * step_time_s / 0.5],
        "bubble_fraction": 0.3,
        "micro_batches": [4, 4],
        "memory_bytes_max": 4.2e8,
    }
    return MetricRow(**{**values, **more})


def started(
    at: float, generation: int, restore_step: int | None, members: list[str], plan: str, **degrees: int
) -> Event:
    """A generation that starts."""
    reason = "first start" if generation == 0 else "1 worker died"
    data = {"members": members, "plan": plan, "restore_step": restore_step, **degrees}
    return event("generation_started", at, generation, reason, **data)


def history() -> tuple[list[Event], list[MetricRow]]:
    """25 steps, a worker killed, 20 steps again from the checkpoint of step 20."""
    nodes = [f"local{index}" for index in range(4)]
    events = [
        event("attempt_started", 0.0, reason="4 local nodes"),
        event("planned", 2.0, reason="pp 2 × dp 2 × tp 1, 0.5 s a step"),
        started(3.0, 0, None, nodes, "plan.json", pp=2, dp=2, tp=1),
        event("checkpoint_saved", 20.5, step=20, seconds=0.4, bytes=12_582_912),
        event("worker_died", 23.0, 0, "worker ended by signal 9", node="local2", rank=2, signal="SIGKILL"),
        started(23.5, 1, 20, nodes, "plan-1.json", pp=1, dp=4, tp=1),
        event("recovered", 29.2, 1, "first step of generation 1", seconds=6.2, step=21),
        event("finished", 39.0, 1, "all steps done", step=40, loss=2.1),
    ]
    first = [row(step, 10.0 + 0.5 * step) for step in range(1, 26)]
    again = [row(step, 29.2 + 0.5 * (step - 21), 1, 0.45 + 0.01 * (step % 3)) for step in range(21, 41)]
    first[0] = first[0].model_copy(update={"step_time_s": 1.4, "placement": _placement()})
    first[19] = first[19].model_copy(update={"valid_loss": 4.2})
    again[-1] = again[-1].model_copy(update={"valid_loss": 2.3})
    return events, [*first, *again]


def _placement() -> list[RankPlacement]:
    return [
        RankPlacement(
            rank=rank,
            device=f"local{rank}:cpu0",
            stages=[rank // 2],
            layers=[0, 1, 2] if rank < 2 else [3, 4, 5],
            micro_batch=2,
            micro_batches=4,
        )
        for rank in range(4)
    ]


def topology(count: int = 4, name: Callable[[int], str] = "local{}".format) -> Topology:
    """Nodes with one CPU each, every pair measured but the last one."""
    nodes = [
        Node(
            id=name(index),
            addr="127.0.0.1",
            devices=[
                Device(id="cpu0", type="cpu", flops={"fp32": 3e10 + 1e9 * index}, memory_bytes=4e9, launch_s=6e-6)
            ],
            health=Health(verdict="ok"),
        )
        for index in range(count)
    ]
    slow = Reason(code="SLOW_NODE", text="fp32 18 GFLOP/s, others 31 GFLOP/s")
    nodes[-1] = nodes[-1].model_copy(update={"health": Health(verdict="degraded", reasons=[slow])})
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)][:-1]
    links = [Link(a=name(a), b=name(b), ab=_figures(1.0 + 0.1 * a), ba=_figures(1.2 + 0.05 * b)) for a, b in pairs]
    return Topology(
        provenance=Provenance(version="0.1.0", created="2026-01-01T00:00:00Z", transport="tcp", loopback=True),
        device_types={"cpu": DeviceType(kind="cpu", name="Generic CPU")},
        nodes=nodes,
        fabric=Fabric(links=links),
    )


def _figures(gigabytes: float) -> LinkFigures:
    latency = Latency(min=18e-6, p50=22e-6 * gigabytes, p95=60e-6)
    return LinkFigures(latency_s=latency, isolated_bytes_per_s=gigabytes * 1e9, loaded_bytes_per_s=gigabytes * 6e8)


def plan(pp: int = 2, dp: int = 2) -> Plan:
    """A plan for 4 nodes."""
    cuts = {1: [(0, 6)], 2: [(0, 3), (3, 6)]}[pp]
    places = [f"local{index}:cpu0" for index in range(4)]
    rows = 16 // dp
    return Plan(
        pp=pp,
        dp=dp,
        tp=1,
        stages=[Stage(layers=cut) for cut in cuts],
        replicas=[
            Replica(
                rows=rows,
                micro_batch=2,
                micro_batches=rows // 2,
                devices=[[places[replica + dp * stage]] for stage in range(pp)],
            )
            for replica in range(dp)
        ],
        ranks=places,
        compression=[CodecSpec(codec=Mixed(mode="mixed", groups=(GroupCodec(mode="int4", layers="attention"),)))],
        predicted=Predicted(
            step_time_s={"compute": 0.31, "pipeline_bubble": 0.09, "data_parallel": 0.04, "total": 0.44},
            memory_bytes=dict.fromkeys(places, 4.0e8),
            bound_s=0.38,
        ),
        rejected=[
            Rejected(change="pp 4, dp 1", delta_s=0.12, reason="pipeline bubble 0.2 s with 8 micro-batches"),
            Rejected(change="tp 3", reason="4 heads cannot be shared by 3 devices"),
        ],
        notes=["The links are loopback: predictions for a network will differ."],
    )


class RunFolder:
    """A run folder that tests fill."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, events: list[Event], rows: list[MetricRow]) -> None:
        """Append events and metrics as a run does."""
        for kind, items in (("events", events), ("metrics", rows)):
            for item in items:
                append_line(self.path / f"{kind}.jsonl", json.dumps(item.to_json()))


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    """A folder with nothing but a run file."""
    folder = tmp_path / "runs" / "fable-20260102T030405Z-00ff"
    folder.mkdir(parents=True)
    write_json(folder / "run.yaml", RUN)
    return RunFolder(folder)


@pytest.fixture
def finished_run(run_folder: RunFolder) -> RunFolder:
    """A whole run with a fault."""
    run_folder.write(*history())
    topology().write(run_folder.path / "topology.json")
    plan(2, 2).write(run_folder.path / "plan.json")
    plan(1, 4).write(run_folder.path / "plan-1.json")
    return run_folder


class Make:
    """What the tests build runs from."""

    event = staticmethod(event)
    row = staticmethod(row)
    started = staticmethod(started)
    history = staticmethod(history)
    topology = staticmethod(topology)
    plan = staticmethod(plan)
    run = RUN
    start_s = START_S


@pytest.fixture(scope="session")
def make() -> type[Make]:
    """Builders of events, rows, topologies and plans."""
    return Make
