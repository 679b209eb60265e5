"""Rows of the selfcheck from a topology: what the probe measured of devices, and of messages between nodes."""

from __future__ import annotations

import statistics

from hpctrain.base.units import format_seconds, format_si
from hpctrain.probe.measure.data_sheet import peak_flops
from hpctrain.records.history.selfcheck import PathResult, PathVerdict
from hpctrain.records.topology.topology import Device, Node, Topology

FEWEST_OF_PEAK = 0.5
"""Share of the FLOP/s in the data sheet below which the verdict on matrix products is slow. Healthy GPUs reach 0.6
to 0.8 in sustained products."""


def rows_of(topology: Topology) -> list[PathResult]:
    """Return the rows of every node's devices, then the rows of messages between nodes."""
    rows = [row for node in topology.nodes for row in _rows_of_node(node, topology)]
    return rows + _messages(topology)


def _rows_of_node(node: Node, topology: Topology) -> list[PathResult]:
    types = topology.device_types
    gpus = [device for device in node.devices if types[device.type].kind == "cuda"]
    rows = []
    for device in node.devices:
        rows.append(_row(f"products, {device.id}", node, *_products(device, types[device.type].name)))
        if device.memory_bytes_per_s is not None:
            figure = (
                f"copies {format_si(device.memory_bytes_per_s, 'B/s')}, launch {format_seconds(device.launch_s or 0)}"
            )
            rows.append(_row(f"memory, {device.id}", node, figure))
    if not gpus:
        names = ("NVML", "host copies", "copies between devices")
        return rows + [_row(name, node, "no GPU", verdict="left out") for name in names]
    rows += [_row(f"NVML, {device.id}", node, *_nvml(device)) for device in gpus]
    for device in gpus:
        to, back = device.host_to_device_bytes_per_s, device.device_to_host_bytes_per_s
        if to is not None and back is not None:
            figure = f"to the GPU {format_si(to, 'B/s')}, back {format_si(back, 'B/s')}"
            rows.append(_row(f"host copies, {device.id}", node, figure))
    if len(gpus) == 1:
        return [*rows, _row("copies between devices", node, "one device", verdict="left out")]
    speeds = [speed for device in gpus for speed in device.copy_bytes_per_s.values()]
    wrong = [f"{a.id} to {b.id}" for a in gpus for b in gpus if a.id != b.id and b.id not in a.copy_bytes_per_s]
    figure = f"median {format_si(statistics.median(speeds), 'B/s')}" if speeds else ""
    verdict: PathVerdict = "failed" if wrong else "ok"
    figure = f"other bytes arrived: {', '.join(wrong)}" if wrong else figure
    return [
        *rows,
        _row(
            "copies between devices",
            node,
            figure,
            "the bytes that were sent",
            verdict,
            "IOMMU or PCIe ACS: set NCCL_P2P_DISABLE=1, and report it to the site",
        ),
    ]


def _products(device: Device, name: str) -> tuple[str, str, PathVerdict, str]:
    speeds = ", ".join(f"{dtype} {format_si(speed, 'FLOP/s')}" for dtype, speed in sorted(device.flops.items()))
    peak = peak_flops(name)
    half = max((device.flops.get(dtype, 0.0) for dtype in ("bf16", "fp16")), default=0.0)
    if peak is None or half == 0.0:
        return speeds, "", "ok", ""
    slow = half < FEWEST_OF_PEAK * peak
    figure = f"{speeds}: {half / peak:.0%} of the data sheet"
    return (
        figure,
        f"≥ {FEWEST_OF_PEAK:.0%}",
        "slow" if slow else "ok",
        "is the GPU shared, hot or limited in power? see `hpctrain probe`",
    )


def _nvml(device: Device) -> tuple[str, str, PathVerdict, str]:
    link = f"PCIe {device.pcie.generation} x{device.pcie.width}" if device.pcie else "PCIe unknown"
    errors = "ECC unknown" if device.ecc_errors is None else f"{device.ecc_errors} ECC errors"
    held = ", ".join(device.throttle_reasons) or "not throttled"
    xid = [f"Xid {device.xid}"] if device.xid is not None else []
    figure = ", ".join([f"driver {device.driver or 'unknown'}", link, errors, held, *xid])
    bad = bool(device.ecc_errors or device.xid is not None)
    verdict: PathVerdict = "failed" if bad else "slow" if device.throttle_reasons else "ok"
    return (
        figure,
        "no errors, not throttled",
        verdict,
        "report the device to the site; leave its node out: cluster.exclude: NODE",
    )


def _messages(topology: Topology) -> list[PathResult]:
    """Return a row for each link class and each backend (gloo, NCCL) over which the probe measured messages between
    nodes; if there is none, one row that says so."""
    rows = []
    for kind in topology.fabric.classes:
        for name, figures in kind.backend.items():
            network = f" over {figures.network}" if figures.network else ""
            speed = format_si(1 / figures.beta_s_per_byte, "B/s")
            figure = f"start-up {format_seconds(figures.alpha_s)}, then {speed}{network}"
            rows.append(PathResult(path=f"{name} between nodes", verdict="ok", figure=figure, seconds=0.0))
    if not rows:
        rows.append(PathResult(path="messages between nodes", verdict="left out", figure="one node", seconds=0.0))
    return rows


def _row(
    path: str, node: Node, figure: str, expected: str = "", verdict: PathVerdict = "ok", next_step: str = ""
) -> PathResult:
    next_step = next_step if verdict in ("slow", "failed") else ""
    return PathResult(
        path=path, verdict=verdict, figure=figure, expected=expected, next_step=next_step, seconds=0.0, node=node.id
    )
