"""Rows of metrics.jsonl from a cluster on which a known profile is the truth, and run folders with such rows."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.history.generation import Generation, Member, StoreAddress
from hpctrain.records.history.run_log import BytesSent, MetricRow, RankPlacement
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES

BASE_BYTES = 3e8


def truth(**factors: object) -> CalibrationProfile:
    return CalibrationProfile.model_validate({"source": "truth", "generations": [0], "steps": 1} | factors)


def rows_made(
    plan: Plan, run: Run, topology: Topology, real: CalibrationProfile, count: int = 40, generation: int = 0
) -> list[MetricRow]:
    """`count` equal steps of the plan on a cluster where `real` says what everything takes."""
    scene = layout_of_plan(run, run.spec(), plan.model_copy(update={"profile": real}), topology)
    layout, split = scene.layout, plan.schedule in SPLIT_BACKWARD_SCHEDULES
    stages = []
    for stage, share in enumerate(layout.model_parts):
        times = []
        for replica in range(layout.dp):
            took = scene.cost.stage(layout.unit(replica, stage), layout.micro_batch, share)
            backward = took.inputs + took.weights if split else took.backward
            times.append(layout.micro_batches[replica] * (took.forward + backward))
        stages.append(max(times))
    placed = [
        RankPlacement(
            rank=rank, device=device, stages=[0], layers=[0], micro_batch=1, micro_batches=1, base_bytes=BASE_BYTES
        )
        for rank, device in enumerate(plan.ranks)
    ]
    tokens, took_s = plan.sequences * run.data.seq_len, predict(scene.cost, layout, whole=True).total
    return [
        MetricRow(
            step=step, generation=generation, time_s=1e9 + step, step_time_s=took_s, loss=2.0, lr=1e-3, tokens=tokens,
            samples=step * plan.sequences, tokens_per_s=tokens / took_s, bytes_sent=BytesSent(), stage_time_s=stages,
            micro_batches=[replica.micro_batches for replica in plan.replicas],
            memory_bytes_max=max(layout.memory(scene.cost.memory).values()),
            placement=placed if step == 1 else None,
        )
        for step in range(1, count + 1)
    ]  # fmt: skip


def write_generation(
    folder: Path, plan: Plan, run: Run, topology: Topology, real: CalibrationProfile, count: int, number: int = 0
) -> Generation:
    """A decided generation of a run folder with its steps; run file and topology are written along."""
    run.write(folder / "run.yaml")
    topology.write(folder / "topology.json")
    (folder / "generations").mkdir(exist_ok=True)
    name = f"generations/plan-{number:06d}.0000.json"
    plan.write(folder / name)
    members = [
        Member(node=node.id, incarnation=node.id, addr="127.0.0.1", store_port=1)
        for node in topology.nodes
        if node.id in plan.nodes
    ]
    store = StoreAddress(addr="127.0.0.1", port=1, node=plan.nodes[0])
    record = Generation(number=number, attempt=0, members=members, plan=name, store=store, reason="start")
    record.write(folder / "generations" / f"gen-{number:06d}.json")
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.writelines(
            json.dumps(row.to_json()) + "\n" for row in rows_made(plan, run, topology, real, count, number)
        )
    return record
