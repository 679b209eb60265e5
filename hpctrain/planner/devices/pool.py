"""The devices and links that a plan may use, selected from a topology by the run file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.base.net.vertex_cover import vertex_cover
from hpctrain.planner.devices.constants import (
    COST_CONSTANTS,
    DEFAULT_CODEC_S,
    HPCTRAIN_FRAMEWORK,
    CostConstants,
    Framework,
)
from hpctrain.planner.devices.contention import SharedPorts
from hpctrain.planner.devices.links import Links
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.topology import CodecSeconds, Device, Node, Topology

DEFAULT_LAUNCH_S = {"cpu": 1e-6, "cuda": 6e-6}
"""Kind of device -> launch time in seconds if it was not measured."""
DEFAULT_BYTES_PER_S = {"cpu": 1e10, "cuda": 5e11}
"""Kind of device -> memory bandwidth in bytes/s if it was not measured. The values are those of one server core and of
an older data-centre GPU.
"""


@dataclass(frozen=True)
class DeviceSpec:
    """A device with the measured figures that the cost model needs.

    `kind` is cpu or cuda; `type` is the model of the device, as the topology names it.
    """

    device_id: DeviceId
    kind: str
    type: str
    flops: float
    """Sustained FLOP/s at the run's precision."""
    memory_bytes: float | None
    """Bytes of memory; None if not measured."""
    bytes_per_s: float
    """Memory bandwidth in bytes/s."""
    launch_s: float
    """Launch time: median seconds of one tiny operation."""
    codec_s: CodecSeconds | None = None
    """Seconds per number of each codec; None if not measured."""

    @property
    def node(self) -> str:
        return self.device_id.node

    def slower(self, factor: float) -> DeviceSpec:
        """Return the device with its times for FLOPs, memory and launches multiplied by `factor`. The seconds of codecs
        stay.
        """
        return replace(
            self, flops=self.flops / factor, bytes_per_s=self.bytes_per_s / factor, launch_s=self.launch_s * factor
        )


@dataclass(frozen=True)
class DevicePool:
    """The devices and links that a plan may use."""

    devices: tuple[DeviceSpec, ...]
    """The usable devices in the topology's order, so the devices of a node are consecutive."""
    links: Links
    notes: tuple[str, ...] = ()
    """Sentences for the plan: which nodes and devices were left out, and which figures were not measured."""
    profile: CalibrationProfile | None = None
    """Factors from measured steps, which `make_device_pool` has already applied to devices and links; None without
    them."""

    @cached_property
    def constants(self) -> Mapping[str, CostConstants]:
        """Kind of device -> constants of the cost model, multiplied by the profile's factors."""
        profile = self.profile
        if profile is None:
            return COST_CONSTANTS
        shared = profile.tensor_parallel or 1.0
        update = profile.update or 1.0
        return {
            kind: replace(
                base,
                sent_byte_passes=(profile.communication or 1.0) * base.sent_byte_passes,
                tensor_parallel_ops=(shared * base.tensor_parallel_ops[0], shared * base.tensor_parallel_ops[1]),
                optimizer=base.optimizer.scaled(update),
                sharded_optimizer=base.sharded_optimizer.scaled(update),
                split_optimizer=base.split_optimizer.scaled(update),
                step_ops=update * base.step_ops,
            )
            for kind, base in COST_CONSTANTS.items()
        }

    @cached_property
    def framework(self) -> Framework:
        """hpctrain's runtime, with the bytes of a worker process from the profile, if the profile has them."""
        measured = self.profile.process_bytes.get(self.devices[0].kind) if self.profile is not None else None
        return replace(HPCTRAIN_FRAMEWORK, process_bytes=measured)

    def by_node(self) -> dict[str, list[DeviceSpec]]:
        """Return node -> its devices. Nodes and devices are in the topology's order."""
        nodes: dict[str, list[DeviceSpec]] = {}
        for device in self.devices:
            nodes.setdefault(device.node, []).append(device)
        return nodes


def make_device_pool(run: Run, topology: Topology, profile: CalibrationProfile | None = None) -> DevicePool:
    """Return the pool of devices of the requested kind, at most `cluster.devices_per_node` of each node, on nodes that
    are not excluded, are no spares, reach each other and have figures of the links between them.

    Args:
        profile: factors from measured steps, applied to the probed figures of devices and links; None: no factors.

    Raises:
        RefusedError: no device of the requested kind remains, or there are no more usable nodes than spares.
        InputError: a figure that the cost model needs is missing, no two nodes have a link with figures, or
            `cluster.devices_per_node` is not the number of devices as which a node's CPUs were measured.
    """
    notes: list[str] = []
    kind = _device_kind(run, topology)
    costs = LinkCost(topology)
    nodes = _connected(_usable_nodes(run, topology, kind, notes), topology, costs, notes)
    devices: list[DeviceSpec] = []
    for node in nodes:
        for device in _devices(run, topology, node, kind):
            devices.append(_device_spec(run.precision, topology, node, device, notes))
    devices = _without_spares(devices, run.recovery.spares, notes)
    if profile is not None:
        devices = [device.slower(profile.compute.get(device.type, 1.0)) for device in devices]
    slower = 1.0 if profile is None else profile.communication or 1.0
    links = Links(costs, slower, SharedPorts(topology))
    return DevicePool(tuple(devices), links, tuple(dict.fromkeys(notes)), profile)


def _device_kind(run: Run, topology: Topology) -> str:
    there = {topology.device_types[device.type].kind for node in topology.nodes for device in node.devices}
    wanted = run.cluster.device
    if wanted == "auto":
        return "cuda" if "cuda" in there else "cpu"
    if wanted not in there:
        raise RefusedError(
            f"cluster.device: found {wanted!r}, the topology has {', '.join(sorted(there)) or 'no device'} only; "
            "change it or probe other nodes"
        )
    return wanted


def _usable_nodes(run: Run, topology: Topology, kind: str, notes: list[str]) -> list[Node]:
    excluded = [node.id for node in topology.nodes if node.id in topology.verdict.exclude]
    nodes = [node for node in topology.nodes if node.id not in excluded and _devices(run, topology, node, kind)]
    if not any(node.devices for node in topology.nodes):
        raise RefusedError("topology: nodes: found no device; run `hpctrain probe`, or give another topology")
    if not nodes:
        raise RefusedError(
            f"topology: no {kind} device is left: the verdict excludes {', '.join(excluded) or 'none'} of "
            f"{len(topology.nodes)} nodes; repair them, or probe other nodes"
        )
    if excluded:
        notes.append(f"Left out on the probe's advice: {', '.join(excluded)}.")
    return nodes


def _connected(nodes: list[Node], topology: Topology, costs: LinkCost, notes: list[str]) -> list[Node]:
    """Return nodes of which the link between any two is not broken and has figures; as few of the given nodes as
    possible are left out.

    Args:
        notes: gets sentences that name the nodes that are left out.

    Raises:
        InputError: of several nodes, no two have a link with figures.
    """
    names = [node.id for node in nodes]
    apart = vertex_cover(names, topology.fabric.broken)
    if apart:
        notes.append(f"Left out because the probe could not measure links between them and others: {', '.join(apart)}.")
    names = [name for name in names if name not in apart]
    unknown = costs.unknown_pairs(names)
    if unknown and len(unknown) == math.comb(len(names), 2):
        pair = " and ".join(unknown[0])
        raise InputError(
            f"topology: fabric.links: no alpha_s and beta_s_per_byte between {pair}, nor between any other nodes; run "
            "`hpctrain probe`, or plan for one node with --nodelist"
        )
    if unmeasured := vertex_cover(names, unknown):
        notes.append(
            f"Left out because the topology has no figures of links between them and others: {', '.join(unmeasured)}."
        )
    return [node for node in nodes if node.id not in {*apart, *unmeasured}]


def _devices(run: Run, topology: Topology, node: Node, kind: str) -> Sequence[Device]:
    fitting = [device for device in node.devices if topology.device_types[device.type].kind == kind]
    wanted = run.cluster.devices_per_node
    if kind == "cpu" and fitting and wanted not in (None, len(fitting)) and topology.provenance.mode != "published":
        raise InputError(
            f"cluster.devices_per_node: found {wanted}, the CPUs of {node.id} were measured as {len(fitting)} "
            f"device{'' if len(fitting) == 1 else 's'}; allowed: {len(fitting)}, or run `hpctrain probe "
            f"--cpu-devices {wanted}`"
        )
    return fitting[: run.cluster.devices_per_node]


def _device_spec(precision: str, topology: Topology, node: Node, device: Device, notes: list[str]) -> DeviceSpec:
    device_id, kind = DeviceId.of(node.id, device.id), topology.device_types[device.type].kind
    flops = device.flops.get(precision)
    if flops is None and precision != "fp32" and "fp32" in device.flops:
        flops = device.flops["fp32"]
        notes.append(f"{precision} was not measured on some devices; their fp32 speed stands in for it.")
    if not flops:
        raise InputError(
            f"topology: nodes: device {device.id} of {node.id}: flops has no {precision!r}; run `hpctrain probe` again"
        )
    if device.memory_bytes is None:
        notes.append(f"The memory of {device_id} was not measured, so nobody checked that the plan fits it.")
    if device.memory_bytes_per_s is None or device.launch_s is None:
        notes.append("Memory bandwidth or launch time of some devices was not measured; typical values stand in.")
    return DeviceSpec(
        device_id=device_id,
        kind=kind,
        type=device.type,
        flops=flops,
        memory_bytes=device.memory_bytes,
        bytes_per_s=device.memory_bytes_per_s or DEFAULT_BYTES_PER_S[kind],
        launch_s=DEFAULT_LAUNCH_S[kind] if device.launch_s is None else device.launch_s,
        codec_s=_codec_seconds(device, kind),
    )


def _codec_seconds(device: Device, kind: str) -> CodecSeconds | None:
    """Return the measured seconds of the codecs. If a probe measured none of rotated integers, they are those of plain
    integers, multiplied by the ratio of both on a typical device (`DEFAULT_CODEC_S`). None: no codec was measured."""
    seconds, usual = device.codec_s, DEFAULT_CODEC_S[kind]
    if seconds is None or seconds.rotated is not None or usual.rotated is None:
        return seconds
    return seconds.model_copy(update={"rotated": seconds.quantized * usual.rotated / usual.quantized})


def _without_spares(devices: list[DeviceSpec], spares: int, notes: list[str]) -> list[DeviceSpec]:
    """Return the devices without those of the slowest `spares` nodes, which stay idle.

    Args:
        notes: gets a sentence that names the idle nodes.

    Raises:
        RefusedError: there are no more nodes than spares.
    """
    if not spares:
        return devices
    speed: dict[str, float] = {}
    for device in devices:
        speed[device.node] = speed.get(device.node, 0.0) + device.flops
    if spares >= len(speed):
        raise RefusedError(
            f"recovery.spares: found {spares}, but only {len(speed)} nodes are usable; allowed: 0 to {len(speed) - 1}"
        )
    # Of equally fast nodes the last one becomes a spare, so that the other nodes keep consecutive numbers.
    order = sorted(speed, key=lambda node: (speed[node], -list(speed).index(node)))
    idle = order[:spares]
    notes.append(f"Kept idle as spares: {', '.join(sorted(idle))}.")
    return [device for device in devices if device.node not in idle]
