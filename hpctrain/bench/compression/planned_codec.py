"""The codec that the planner chooses for the processes of the compression bench, in the method auto."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpctrain.bench.planner.search import uniform_topology
from hpctrain.planner import make_plan
from hpctrain.probe.measure.figures import fit_alpha_beta
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import BUCKET_BYTES
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Device, Node
from hpctrain.worker.measure.rates import DeviceTimer, codec_seconds, copy_bytes_per_s, launch_seconds, matmul_flops

SIZES = (1, 2**16, 2**20, BUCKET_BYTES // 4)
"""Numbers of fp32 values in the all-reduces with which a link is measured. The largest is a bucket of gradients."""
REPEATS = 9
"""All-reduces of each size. Where processes share cores, single ones take up to four times as long as others."""


class StepWorkload(NamedTuple):
    """What one process computes in a training step: the model, and the sequences of its batch."""

    spec: DecoderSpec
    rows: int
    """Sequences of a process in a step."""
    seq_len: int


class ChoiceRequest(NamedTuple):
    """For what the planner chooses a codec in the method auto."""

    link: tuple[float, float] | None = None
    """Alpha in seconds and beta in seconds per byte of all links, where the network is simulated; None: the links are
    measured."""
    loss_budget: float = 0.0
    """The key of this name in mode auto."""
    steps: int = 10_000
    """Number of steps of the run; with 10,000, the warm-up does not matter."""


USUAL_CHOICE = ChoiceRequest()
"""The choice for the measured links, without a loss budget."""


def choose_codec(group: dist.ProcessGroup, work: StepWorkload, request: ChoiceRequest) -> CodecSpec:
    """Return the codec that the planner chooses in mode auto if each process of the group holds a whole replica. All
    ranks get the same codec. All-reduces in the group measure the link, if the request does not have its cost; the
    devices are measured as by a probe. Collective."""
    cost = request.link or _link_cost(group)
    # All processes measure at the same time, as in a probe: those that share cores then measure their real share.
    dist.barrier(group)
    measured: list[Any] = [None] * dist.get_world_size(group)
    # What the link of a simulated network is added to is processor time, on which other load has no influence.
    now = time.perf_counter if request.link is None else time.process_time
    dist.all_gather_object(measured, (_device(now), cost), group=group)
    # Every rank makes the same plan: from the devices of all ranks, and from the link as the first rank measured it.
    return _planned([device for device, _ in measured], work, measured[0][1], request)


def _link_cost(group: dist.ProcessGroup) -> tuple[float, float]:
    """Return (alpha in seconds, beta in seconds per byte) of the link between neighbouring ranks, from the times of
    ring all-reduces, in which all processes send at once. Collective."""
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


def _device(now: Callable[[], float]) -> Device:
    """Return the device of this process, measured by the clock `now`. It has no memory size, because memory does not
    matter for the choice of a codec."""
    timer = DeviceTimer(torch.device("cpu"), now)
    return Device(
        id="cpu0",
        type="cpu",
        flops={"fp32": matmul_flops(timer, torch.float32)},
        memory_bytes_per_s=copy_bytes_per_s(timer),
        launch_s=launch_seconds(timer),
        codec_s=codec_seconds(timer),
    )


def _planned(
    devices: Sequence[Device], work: StepWorkload, cost: tuple[float, float], request: ChoiceRequest
) -> CodecSpec:
    world = len(devices)
    run = Run.model_validate({
        "steps": request.steps, "model": {"dims": work.spec.model_dump(exclude={"family"}, exclude_none=True)},
        "data": {"train": ["."], "seq_len": work.seq_len}, "batch": {"global": world * work.rows},
        "parallel": {"mode": "fixed", "dp": world, "micro_batch": work.rows},
        "compression": {"mode": "auto", "loss_budget": request.loss_budget},
    })  # fmt: skip
    nodes = [Node(id=f"local{number}", addr="127.0.0.1", devices=[device]) for number, device in enumerate(devices)]
    return make_plan(run, work.spec, uniform_topology(nodes, "cpu", *cost)).compression[-1]
