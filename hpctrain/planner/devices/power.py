"""The power of busy devices by type: measured by runs, or by the probe under load."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.records.history.node_log import NodeRow, read_node_log
from hpctrain.records.history.run_log import MetricRow, read_metrics
from hpctrain.records.topology.topology import Topology


def probed_watts(topology: Topology) -> dict[str, float]:
    """Return device type -> mean power of its devices under the probe's load, in watts. A type is absent unless the
    power of one of its devices was measured."""
    watts = defaultdict(list)
    for node in topology.nodes:
        for device in node.devices:
            if device.power_w:
                watts[device.type].append(device.power_w)
    return {name: statistics.fmean(values) for name, values in watts.items()}


def run_watts(folder: Path) -> dict[str, float]:
    """Return what `trained_watts` returns for the run in a run folder; {} if metrics-nodes.jsonl has no rows.

    Raises:
        FileError: a file of the run is missing or has errors.
        UntrustedError: a file of the run belongs to somebody else, or others can write to it.
    """
    rows = read_node_log(folder)
    if not rows:
        return {}
    return trained_watts(
        rows, read_metrics(folder / "metrics.jsonl"), Topology.read(folder / "topology.json", owned=True)
    )


def trained_watts(rows: Sequence[NodeRow], metrics: Sequence[MetricRow], topology: Topology) -> dict[str, float]:
    """Return device type -> mean power of its devices while a run trained, in watts: of a GPU its own, of a CPU device
    its share of the processors and memory of its machine. A type is absent if no power of it was measured.

    Args:
        rows: the run's rows of metrics-nodes.jsonl. Those between the first and the last step count, or all if there
            are none.
        metrics: the run's rows of metrics.jsonl.
        topology: the run's topology.
    """
    start, end = (metrics[0].time_s, metrics[-1].time_s) if metrics else (0.0, 0.0)
    between = [row for row in rows if start <= row.time_s - row.seconds and row.time_s <= end]
    nodes = {node.id: node for node in topology.nodes}
    rows = [row for row in between or rows if row.node in nodes]
    machines: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        machines[row.machine].add(row.node)
    joules: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        types = {device.id: device.type for device in nodes[row.node].devices}
        used: Mapping[str, float | None] = {gpu.device: gpu.energy_j for gpu in row.gpus or []}
        if not used:
            sharing = sum(len(nodes[name].devices) for name in machines[row.machine])
            host_j = row.host_j()
            used = dict.fromkeys(types, None if host_j is None else host_j / sharing)
        for device, device_j in used.items():
            if device_j is not None and device in types:
                joules[types[device]] += device_j
                seconds[types[device]] += row.seconds
    return {name: joules[name] / seconds[name] for name in joules}
