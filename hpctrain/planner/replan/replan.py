"""New plans for a run after a loss or a change: for its remaining nodes, and what-if with slower nodes or links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.planner.devices.constants import DEFAULT_CODEC_S
from hpctrain.planner.devices.pool import DEFAULT_BYTES_PER_S, DEFAULT_LAUNCH_S
from hpctrain.planner.make import PlanRequest, make_plan
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.run import AutoParallel, Run
from hpctrain.records.topology.link import Link, LinkFigures
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.topology import Device, Fabric, Node, Topology

MAX_FACTOR = 1e6
"""Largest factor by which a what-if makes a node or a link faster; the smallest is its inverse."""


def replan(
    run: Run,
    spec: Spec,
    remaining: Topology,
    lost: int,
    previous: Plan | None = None,
    profile: CalibrationProfile | None = None,
    layers: tuple[LayerFigures, ...] = (),
) -> tuple[Plan, str]:
    """Return the plan for a run after nodes were lost, and a remark; the remark is empty unless fixed degrees were
    dropped.

    Degrees that the run file fixes are dropped if the remaining nodes do not allow them. They were chosen for the
    requested nodes, and it matters more that the run continues.

    Args:
        remaining: the topology of the remaining nodes.
        lost: number of lost nodes.
        previous: the plan that ran on all nodes; as much of its state as possible stays on its device. None: there is
            none.
        profile: factors on the cost model's constants from measured steps; None: no factors.
        layers: what was measured of the run's layers, over all ranks; empty: nothing.

    Raises:
        RefusedError: the model does not fit on the remaining nodes, or none of their devices is usable.
        InputError: the run file asks for something impossible, the topology lacks a figure, or `previous` is a plan of
            another model.
    """
    run = with_fewer_spares(run, lost)
    # The run stands still during this search, so rejected neighbours are left to `hpctrain plan --previous`.
    request = PlanRequest(neighbours=False, layers=layers)

    def make(run: Run) -> Plan:
        return make_plan(run, spec, remaining, request, previous=previous, profile=profile)

    try:
        return make(run), ""
    except (InputError, RefusedError) as error:
        if run.parallel.mode != "fixed":
            raise
        anyhow = run.model_copy(update={"parallel": AutoParallel()})
        return make(anyhow), f"without parallel.mode fixed: {error}"


def with_fewer_spares(run: Run, lost: int) -> Run:
    """Return the run with one spare fewer for each lost node, but at least 0, because spares replace lost nodes."""
    recovery = run.recovery.model_copy(update={"spares": max(0, run.recovery.spares - lost)})
    return run.model_copy(update={"recovery": recovery})


@dataclass(frozen=True)
class TopologyChanges:
    """Changes to a topology, to ask what plan would follow from them."""

    slow: Mapping[str, float] = field(default_factory=dict)
    """Node -> its speed as a factor of the present speed; with 0.5 everything takes twice as long."""
    slow_devices: Mapping[DeviceId, float] = field(default_factory=dict)
    """Device -> its speed as a factor of the present speed, on top of its node's in `slow`."""
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Pair of nodes -> bandwidth of their link as a factor of the present bandwidth, in both directions."""
    lost: tuple[str, ...] = ()
    """Nodes that are lost."""


def apply_changes(topology: Topology, changes: TopologyChanges) -> Topology:
    """Return the topology with the changed speeds of nodes, devices and links. Lost nodes are still in it, because
    `plan_without` removes them.

    Raises:
        InputError: a node or a device is not in the topology, a factor is not between 1 / `MAX_FACTOR` and
            `MAX_FACTOR`, a link has one node as both its ends, or the topology has no figures of a link.
    """
    _check(topology, changes)
    topology = _with_intra(topology)
    factors = {
        device: changes.slow.get(device.node, 1.0) * changes.slow_devices.get(device, 1.0)
        for device in topology.device_ids()
    }
    nodes = [_slowed(topology, node, factors) for node in topology.nodes]
    fabric = topology.fabric
    for (a, b), factor in changes.links.items():
        fabric = _with_link(topology, fabric, a, b, factor)
    return topology.model_copy(update={"nodes": nodes, "fabric": fabric})


def plan_without(
    run: Run, spec: Spec, topology: Topology, lost: tuple[str, ...], previous: Plan | None = None
) -> tuple[Plan, str]:
    """Return the plan that the agents would make for the remaining nodes, and a remark on it (see `replan`).

    Args:
        lost: names of the lost nodes.
        previous: the plan that runs before the loss; None: there is none.

    Raises:
        RefusedError: too few nodes are left, or the model does not fit on them.
        InputError: as for `replan`.
    """
    remaining = [node.id for node in topology.nodes if node.id not in lost]
    if len(remaining) < run.recovery.min_nodes:
        raise RefusedError(
            f"--lose: {len(remaining)} nodes would be left, recovery.min_nodes is {run.recovery.min_nodes}: the run "
            "would stop and be requeued"
        )
    profile = previous.profile if previous is not None else None
    return replan(run, spec, topology.only(remaining), len(lost), previous, profile)


def _check(topology: Topology, changes: TopologyChanges) -> None:
    known = {node.id for node in topology.nodes}
    if absent := sorted(set(changes.slow_devices) - set(topology.device_ids())):
        raise InputError(f"found device {absent[0]}, not in the topology; give a device as node:device")
    named = [*changes.slow, *(end for pair in changes.links for end in pair), *changes.lost]
    unknown = sorted(set(named) - known)
    if unknown:
        some = sorted(known)[:6]
        raise InputError(
            f"found node {', '.join(unknown)}, not in the topology; it has {', '.join(some)}{' …' * (len(known) > 6)}"
        )
    factors = [*changes.slow.values(), *changes.slow_devices.values(), *changes.links.values()]
    strange = [factor for factor in factors if not 1 / MAX_FACTOR <= factor <= MAX_FACTOR]
    if strange:
        raise InputError(
            f"found the factor {strange[0]:g}; allowed: {1 / MAX_FACTOR:g} to {MAX_FACTOR:g} (0.5 is half as fast)"
        )
    if any(a == b for a, b in changes.links):
        raise InputError("--link: found the same node twice; a link is between two nodes: a:b=0.25")


def _with_intra(topology: Topology) -> Topology:
    """Return the topology with every node's internal bandwidth (`intra_bytes_per_s`) filled in.

    A missing measurement gets the memory bandwidth of the slowest device of all nodes. It is filled in before a node is
    slowed, because otherwise the slowed node's memory bandwidth could become the internal bandwidth of other nodes. If
    no memory bandwidth was measured, nothing is filled in.
    """
    speeds = [device.memory_bytes_per_s for node in topology.nodes for device in node.devices]
    measured = [speed for speed in speeds if speed]
    if not measured:
        return topology
    nodes = [
        node.model_copy(update={"intra_bytes_per_s": node.intra_bytes_per_s or min(measured)})
        for node in topology.nodes
    ]
    return topology.model_copy(update={"nodes": nodes})


def _slowed(topology: Topology, node: Node, factors: Mapping[DeviceId, float]) -> Node:
    """Return the node with the speeds of its devices multiplied by their factors; defaults stand in for figures that
    were not measured. A device with factor 1 stays as it is.
    """

    def slower(device: Device) -> Device:
        factor = factors[DeviceId.of(node.id, device.id)]
        if factor == 1.0:
            return device
        kind = topology.device_types[device.type].kind
        usual = device.codec_s or DEFAULT_CODEC_S[kind]
        launch_s = DEFAULT_LAUNCH_S[kind] if device.launch_s is None else device.launch_s
        update = {
            "flops": {name: value * factor for name, value in device.flops.items()},
            "memory_bytes_per_s": (device.memory_bytes_per_s or DEFAULT_BYTES_PER_S[kind]) * factor,
            "launch_s": launch_s / factor,
            "codec_s": usual.model_copy(
                update={name: took_s / factor for name, took_s in usual.model_dump(exclude_none=True).items()}
            ),
        }
        return device.model_copy(update=update)

    return node.model_copy(update={"devices": [slower(device) for device in node.devices]})


def _with_link(topology: Topology, fabric: Fabric, a: str, b: str, factor: float) -> Fabric:
    costs = LinkCost(topology)
    try:
        costs_by_direction = [costs.between(one, other) for one, other in ((a, b), (b, a))]
    except KeyError:
        raise InputError(f"--link {a}:{b}: the topology has no figures of it; run `hpctrain probe` again") from None
    known = {(link.a, link.b): link.ab for link in fabric.links} | {(link.b, link.a): link.ba for link in fabric.links}
    ab, ba = (
        LinkFigures(latency_s=known[ends].latency_s if ends in known else None, inferred=True).model_copy(
            update={"alpha_s": alpha, "beta_s_per_byte": beta / factor}
        )
        for ends, (alpha, beta) in zip(((a, b), (b, a)), costs_by_direction, strict=True)
    )
    others = [link for link in fabric.links if {link.a, link.b} != {a, b}]
    return fabric.model_copy(update={"links": [*others, Link(a=a, b=b, ab=ab, ba=ba)]})
