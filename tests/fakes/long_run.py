"""A run folder as a long run on many nodes leaves it behind: made with the record models, of drawn figures.

`python tests/fakes/long_run.py FOLDER --steps 100000 --nodes 1000` makes the one of docs/results/report.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.base.atomic import write_json
from hpctrain.node.node_metrics import line_interval_s
from hpctrain.records.history.node_log import GpuFigures, NodeRow
from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.history.run_log import BytesSent, Event, MetricRow
from hpctrain.records.history.step_spans import FOLDER, RankSpans, StepSpans
from hpctrain.records.plan.plan import Plan, Predicted, Replica, Stage
from hpctrain.records.topology.pair_matrix import PairMatrix
from hpctrain.records.topology.topology import Device, DeviceType, Health, Node, Provenance, Topology

START_S = 1_790_000_000.0
STEP_S = 1.0
RANK_LINES_A_STEP = 4


def write_long_run(folder: Path, steps: int, nodes: int, gpus: int = 8, pp: int = 8, fault_every: int = 10_000) -> None:
    """Write the files of a run: steps of a second, a lost worker after every `fault_every` steps.

    Args:
        folder: the run folder, which must not exist.
        nodes: number of nodes with `gpus` GPUs each; nodes × gpus is a multiple of `pp`.
    """
    folder.mkdir(parents=True, mode=0o700)
    draw = random.Random(0)
    names = [f"n{number:04d}" for number in range(nodes)]
    ranks = [f"{name}:cuda{number}" for name in names for number in range(gpus)]
    dp, batch = len(ranks) // pp, len(ranks) // pp
    write_json(folder / "run.yaml", {
        "schema": "hpctrain.run/v1", "name": "long", "steps": steps, "model": {"preset": "tiny-1m"},
        "data": {"train": ["/data/tokens"], "seq_len": 2048}, "batch": {"global": batch},
        "cluster": {"kind": "slurm", "nodes": str(nodes), "time": "4-00:00:00", "device": "cuda"},
    })  # fmt: skip
    _topology(names, gpus).write(folder / "topology.json")
    plan = Plan(
        pp=pp, dp=dp, tp=1, stages=[Stage(layers=(stage, stage + 1)) for stage in range(pp)],
        replicas=[
            Replica(rows=1, micro_batch=1, micro_batches=1,
                    devices=[[ranks[replica * pp + stage]] for stage in range(pp)])
            for replica in range(dp)
        ],
        ranks=[ranks[replica * pp + stage] for stage in range(pp) for replica in range(dp)],
        predicted=Predicted(step_time_s={"compute": 0.8, "total": 0.95}, memory_bytes=dict.fromkeys(ranks, 6e10)),
    )  # fmt: skip
    plan.write(folder / "plan.json")
    _write(folder / "metrics.jsonl", _rows(steps, batch, pp, fault_every, draw))
    _write(folder / "events.jsonl", _events(steps, names, fault_every))
    _write(folder / "metrics-ranks.jsonl", _rank_rows(plan, steps, fault_every, draw))
    _write(folder / "metrics-nodes.jsonl", _node_rows(names, gpus, steps * STEP_S))
    end = START_S + 600.0 + steps * STEP_S
    attempt = {
        "attempt": 0,
        "job_id": "1",
        "nodes": names,
        "start": START_S,
        "end": end,
        "class": "done",
        "reason": "done",
    }
    (folder / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    spans = [
        RankSpans(
            rank=rank, device=device,
            spans=[("forward stage 0 mb 0", -1.0, -0.6, "compute"), ("reduce dp", -0.6, -0.1, "dp")],
        )
        for rank, device in enumerate(ranks)
    ]  # fmt: skip
    (folder / FOLDER).mkdir()
    StepSpans(step=10, generation=0, ranks=spans).write(folder / FOLDER / "step-10.spans.json")


def _topology(names: list[str], gpus: int) -> Topology:
    devices = [
        Device(id=f"cuda{number}", type="h200", flops={"bf16": 7e14}, memory_bytes=1.4e11) for number in range(gpus)
    ]
    nodes = [Node(id=name, addr="10.0.0.1", devices=devices, health=Health(verdict="ok")) for name in names]
    pairs = PairMatrix(names)
    noise = np.random.default_rng(0).normal(1.0, 0.05, (len(names), len(names)))
    for figure, value in (("bytes_per_s", 2e10), ("isolated_bytes_per_s", 4e10), ("latency_p50_s", 5e-6)):
        pairs[figure][:] = value * noise
    topology = Topology(
        provenance=Provenance(version="0", created="1970-01-01T00:00:00Z", transport="tcp"),
        device_types={"h200": DeviceType(kind="cuda", name="NVIDIA H200")}, nodes=nodes,
    )  # fmt: skip
    return topology.with_pairs(pairs)


def _rows(steps: int, batch: int, pp: int, fault_every: int, draw: random.Random) -> Iterator[MetricRow]:
    time_s, generation, step = START_S + 600.0, 0, 0
    while step < steps:
        step += 1
        seconds = STEP_S * draw.lognormvariate(0.0, 0.05)
        time_s += seconds
        yield MetricRow(
            step=step, generation=generation, time_s=time_s, step_time_s=seconds,
            loss=2.0 + 9.0 * math.exp(-step / 3000) + draw.gauss(0.0, 0.05),
            valid_loss=2.1 + 9.0 * math.exp(-step / 3000) if step % 1000 == 0 else None,
            lr=3e-4 * min(1.0, step / 2000), grad_norm=draw.lognormvariate(0.0, 0.3), tokens=2048 * batch,
            samples=step * batch, tokens_per_s=2048 * batch / seconds, mfu=0.4 / seconds,
            bytes_sent=BytesSent(dp=10**11, pp=10**10),
            stage_time_s=[0.8 * draw.uniform(0.98, 1.02) for _ in range(pp)],
            bubble_fraction=0.1, micro_batches=[1] * min(8, batch), memory_bytes_max=6e10,
        )  # fmt: skip
        if step % fault_every == 0 and step < steps and step // fault_every > generation:
            generation, step, time_s = generation + 1, step - 40, time_s + 30.0


def _events(steps: int, names: list[str], fault_every: int) -> Iterator[Event]:
    def event(kind: Any, at: float, generation: int, **data: Any) -> Event:
        return Event(
            kind=kind, time_s=START_S + at, attempt=0, generation=generation, node=names[0], reason=kind, data=data
        )

    yield event("attempt_started", 0.0, -1, nodes=names)
    for generation in range(-(-steps // fault_every)):
        at = 600.0 + generation * fault_every * STEP_S
        if generation:
            yield event("worker_died", at, generation - 1, node=names[generation % len(names)], rank=1, signal=9)
        yield event("generation_started", at + 1.0, generation, plan="plan.json", members=names)
        if generation:
            first = generation * fault_every - 39
            yield event("recovered", at + 30.0, generation, step=first, seconds=30.0)
        for number in range(1, fault_every // 500):
            saved = generation * fault_every + 500 * number
            yield event("checkpoint_saved", at + 500.0 * number, generation, step=saved, seconds=9.0, size_bytes=10**12)
    yield event("finished", 600.0 + steps * STEP_S, generation, step=steps, loss=2.0)


def _rank_rows(plan: Plan, steps: int, fault_every: int, draw: random.Random) -> Iterator[RankRow]:
    every = max(10, len(plan.ranks) // RANK_LINES_A_STEP)
    owner = {rank: stage for stage, column in enumerate(plan.mesh()) for row in column for rank in row}
    for step in range(every, steps + 1, every):
        for rank, device in enumerate(plan.ranks):
            slow = 1.3 if rank == 7 else draw.uniform(0.98, 1.02)
            yield RankRow(
                step=step, steps=every, generation=step // fault_every, rank=rank, device=device, stages=[owner[rank]],
                forward_s=[round(0.27 * slow, 6)], backward_s=[round(0.53 * slow, 6)], wait_pp_s=0.05, wait_dp_s=0.1,
                wait_world_s=0.01, wait_device_s=0.0, hidden_dp_s=0.0, memory_bytes=6e10,
            )  # fmt: skip


def _node_rows(names: list[str], gpus: int, seconds: float) -> Iterator[NodeRow]:
    """Yield a line of each node as often as nodes of this number write one."""
    at = 0.0
    while at < seconds:
        interval = min(line_interval_s(10.0, len(names), at), seconds - at)
        at += interval
        figures = [
            GpuFigures(
                device=f"cuda{number}", address=f"0000:{number:02x}:00.0", energy_j=500.0 * interval, power_w=500.0,
                use=0.97, temperature_c=61.0, sm_clock_hz=1.9e9, memory_clock_hz=2.6e9,
            )
            for number in range(gpus)
        ]  # fmt: skip
        for name in names:
            yield NodeRow(
                time_s=START_S + 600.0 + at, seconds=interval, attempt=0, node=name, machine=name, gpus=figures
            )


def _write(path: Path, items: Iterator[Any]) -> None:
    with path.open("w") as file:
        for item in items:
            file.write(json.dumps(item.to_json()) + "\n")
    path.chmod(0o600)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=1000)
    wanted = parser.parse_args()
    write_long_run(wanted.folder, wanted.steps, wanted.nodes)
