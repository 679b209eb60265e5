"""Method `auto` of `hpctrain bench compression`: the planner's choice for the link between the processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpctrain.bench.planner.search import uniform_topology
from hpctrain.planner import make_plan
from hpctrain.probe.measure.figures import fit_alpha_beta
from hpctrain.records.model.families import DecoderSpec
from hpctrain.records.plan.compression import CodecSpec
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Device, Node
from hpctrain.worker.measure.rates import DeviceTimer, codec_seconds, copy_bytes_per_s, launch_seconds, matmul_flops

SIZES = (1, 2**16, 2**20)
"""Numbers of fp32 values in the all-reduces by which a link is measured."""
REPEATS = 3
STEPS = 10_000
"""Steps of the run that is planned; with so many, the warm-up does not matter."""


class StepWorkload(NamedTuple):
    """The work of one process in a training step of a method."""

    spec: DecoderSpec
    rows: int
    """Sequences of a process in a step."""
    seq_len: int


def choose_codec(group: dist.ProcessGroup, work: StepWorkload) -> CodecSpec:
    """Return the codec that `compression: {mode: auto}` selects for whole replicas on these processes, equal on every
    rank. All-reduces in the group measure the link; the devices are measured as by a probe. Collective."""
    cost = _link_cost(group)
    # All processes measure at the same time, as in a probe: those that share cores then measure their real share.
    dist.barrier(group)
    measured: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(measured, (_device(), cost), group=group)
    # Every rank makes the same plan: from the devices of all ranks, and from the link as the first rank measured it.
    return _planned([device for device, _ in measured], work, measured[0][1])


def _link_cost(group: dist.ProcessGroup) -> tuple[float, float]:
    """Return (alpha in seconds, beta in seconds per byte) of the link, measured while all processes send at once.
    Collective."""
    world = dist.get_world_size(group)
    points = []
    for numbers in SIZES:
        values = torch.zeros(numbers)
        taken = []
        for _ in range(REPEATS):
            dist.barrier(group)
            start = time.perf_counter()
            dist.all_reduce(values, group=group)
            taken.append(time.perf_counter() - start)
        # A ring all-reduce sends 2·(n−1) messages, each an n-th of the values.
        points.append((values.nbytes / world, statistics.median(taken) / (2 * (world - 1))))
    return fit_alpha_beta(points)


def _device() -> Device:
    """The measured device of this process. It has no memory size, because memory does not matter here."""
    timer = DeviceTimer(torch.device("cpu"))
    return Device(
        id="cpu0",
        type="cpu",
        flops={"fp32": matmul_flops(timer, torch.float32)},
        memory_bytes_per_s=copy_bytes_per_s(timer),
        launch_s=launch_seconds(timer),
        codec_s=codec_seconds(timer),
    )


def _planned(devices: Sequence[Device], work: StepWorkload, cost: tuple[float, float]) -> CodecSpec:
    world = len(devices)
    run = Run.model_validate({
        "steps": STEPS, "model": {"dims": work.spec.model_dump(exclude={"family"}, exclude_none=True)},
        "data": {"train": ["."], "seq_len": work.seq_len}, "batch": {"global": world * work.rows},
        "parallel": {"mode": "fixed", "dp": world, "micro_batch": work.rows}, "compression": {"mode": "auto"},
    })  # fmt: skip
    nodes = [Node(id=f"local{number}", addr="127.0.0.1", devices=[device]) for number, device in enumerate(devices)]
    return make_plan(run, work.spec, uniform_topology(nodes, "cpu", *cost)).compression[0]
