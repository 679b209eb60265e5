"""The codec and the levels of sums that the planner chooses for the processes of the compression bench, in the method
auto."""

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
from hpctrain.records.plan.compression import BUCKET_BYTES
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Device, Node, Topology
from hpctrain.worker.measure.rates import DeviceTimer, codec_seconds, copy_bytes_per_s, launch_seconds, matmul_flops

SIZES = (1, 2**16, 2**20, BUCKET_BYTES // 4)
"""Numbers of fp32 values in the all-reduces with which a link is measured. The largest is a bucket of gradients."""
REPEATS = 9
"""All-reduces of each size. Where processes share cores, single ones take up to four times as long as others."""


LinkCost = tuple[float, float]
"""Alpha in seconds and beta in seconds per byte of a link."""


class StepWorkload(NamedTuple):
    """What one process computes in a training step: the model, and the sequences of its batch."""

    spec: DecoderSpec
    rows: int
    """Sequences of a process in a step."""
    seq_len: int


class ChoiceRequest(NamedTuple):
    """For what the planner chooses a codec in the method auto."""

    link: LinkCost | None = None
    """Cost of all links, where the network is simulated; None: the links are measured."""
    loss_budget: float = 0.0
    """The key of this name in mode auto."""
    steps: int = 10_000
    """Number of steps of the run; with 10,000, the warm-up does not matter."""


USUAL_CHOICE = ChoiceRequest()
"""The choice for the measured links, without a loss budget."""


def measured_plan(
    group: dist.ProcessGroup, node: dist.ProcessGroup | None, work: StepWorkload, request: ChoiceRequest
) -> Plan:
    """Return the plan that the planner makes in mode auto if each process of the group holds a whole replica. All ranks
    get the same plan. All-reduces in the group measure the links between nodes, if the request does not have their
    cost, and all-reduces within the nodes those within nodes; the devices are measured as by a probe. Collective.

    Args:
        node: the processes of this rank's node, which are neighbours in the group; None: each process is a node.
    """
    cost = request.link or _link_cost(group)
    # All processes measure at the same time, as in a probe: those that share cores then measure their real share.
    dist.barrier(group)
    within = None if node is None else _link_cost(node)
    dist.barrier(group)
    measured: list[Any] = [None] * dist.get_world_size(group)
    # What the link of a simulated network is added to is processor time, on which other load has no influence.
    now = time.perf_counter if request.link is None else time.process_time
    dist.all_gather_object(measured, (_device(now), cost, within), group=group)
    # Every rank makes the same plan: from the devices of all ranks, and from the links as the first rank measured them.
    _, cost, within = measured[0]
    size = 1 if node is None else dist.get_world_size(node)
    devices = [device for device, _, _ in measured]
    nodes = [make_node(first // size, devices[first : first + size], within) for first in range(0, len(devices), size)]
    return plan_for(uniform_topology(nodes, "cpu", *cost), work, request)


def _link_cost(group: dist.ProcessGroup) -> LinkCost:
    """Return the cost of the slowest link between neighbouring ranks, from the times of ring all-reduces, in which all
    processes send at once. One process of a node sends to another node. Collective."""
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


def make_node(number: int, devices: Sequence[Device], within: LinkCost | None) -> Node:
    """Return a node with these devices, which it numbers.

    Args:
        within: cost of the links between the node's devices; None: not measured.
    """
    numbered = [device.model_copy(update={"id": f"cpu{place}"}) for place, device in enumerate(devices)]
    alpha_s, beta_s_per_byte = within or (0.0, 0.0)
    return Node(
        id=f"local{number}",
        addr="127.0.0.1",
        devices=numbered,
        intra_alpha_s=alpha_s or None,
        intra_bytes_per_s=1 / beta_s_per_byte if beta_s_per_byte else None,
    )


def plan_for(topology: Topology, work: StepWorkload, request: ChoiceRequest) -> Plan:
    """Return the plan that the planner makes in mode auto with a whole replica on each device of the topology."""
    world = sum(len(node.devices) for node in topology.nodes)
    run = Run.model_validate({
        "steps": request.steps, "model": {"dims": work.spec.model_dump(exclude={"family"}, exclude_none=True)},
        "data": {"train": ["."], "seq_len": work.seq_len}, "batch": {"global": world * work.rows},
        "parallel": {"mode": "fixed", "dp": world, "micro_batch": work.rows},
        "compression": {"mode": "auto", "loss_budget": request.loss_budget},
    })  # fmt: skip
    return make_plan(run, work.spec, topology)
