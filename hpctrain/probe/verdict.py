"""May one train on these nodes? Pure: nodes are compared with their peers, never with a table of nominal figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from hpctrain.base.units import format_si
from hpctrain.probe.outcome import Outcome
from hpctrain.records.topology import Device, Health, Link, Node, Reason, Verdict


def node_healths(
    outcome: Outcome, nodes: Sequence[Node], links: Sequence[Link], slow_ratio: float
) -> dict[str, Health]:
    """The verdict on each node: bad when it did not answer, unknown when it could not be measured, degraded when it is
    below `slow_ratio` of its peers' median in bandwidth or on a device, else ok."""
    slow = _slow_links(links, slow_ratio)
    slow_devices = _slow_devices(nodes, slow_ratio)
    return {node.id: _health(node.id, outcome, slow.get(node.id, []) + slow_devices.get(node.id, [])) for node in nodes}


def overall(outcome: Outcome, healths: dict[str, Health]) -> Verdict:
    """The verdict on the allocation. Nodes that did not answer are to be left out, which is a warning while more than
    half remain; with half or fewer, or nothing measured, leaving nodes out does not help: refuse."""
    exclude = sorted((name for name, health in healths.items() if health.verdict == "bad"), key=outcome.nodes.index)
    faults = [
        Reason(code=reason.code, text=f"{name}: {reason.text}")
        for name, health in healths.items()
        for reason in health.reasons
    ]
    faults += [Reason(code="PROBE_FAILED", text=f"link {a} - {b}: {why}") for (a, b), why in outcome.broken.items()]
    left = len(outcome.nodes) - len(exclude)
    unmeasured = bool(outcome.devices_failed) and not outcome.devices
    if 2 * left <= len(outcome.nodes) or unmeasured:
        return Verdict(status="refuse", exclude=exclude, faults=faults)
    return Verdict(status="warn" if faults else "go", exclude=exclude, faults=faults)


def _health(name: str, outcome: Outcome, slow: list[Reason]) -> Health:
    if name in outcome.lost:
        return Health(verdict="bad", reasons=[Reason(code="UNREACHABLE", text=outcome.lost[name])])
    if name in outcome.devices_failed:
        text = f"its devices were not measured: {outcome.devices_failed[name]}"
        return Health(verdict="unknown", reasons=[Reason(code="PROBE_FAILED", text=text), *slow])
    partners = [pair for pair in outcome.broken if name in pair]
    if partners and not any(name in (result.a, result.b) for result in outcome.pairs):
        return Health(verdict="unknown", reasons=[Reason(code="PROBE_FAILED", text="none of its links works"), *slow])
    return Health(verdict="degraded" if slow else "ok", reasons=slow)


def _slow_links(links: Sequence[Link], slow_ratio: float) -> dict[str, list[Reason]]:
    rates: dict[str, list[float]] = {}
    for link in links:
        for figures in (link.ab, link.ba):
            if figures.isolated_bytes_per_s is not None:
                for end in (link.a, link.b):
                    rates.setdefault(end, []).append(figures.isolated_bytes_per_s)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return _below(medians, slow_ratio, "SLOW_LINK", "link bandwidth", "B/s")


def _slow_devices(nodes: Sequence[Node], slow_ratio: float) -> dict[str, list[Reason]]:
    """Each figure of each device against the median of the devices of its type."""
    groups: dict[tuple[str, str, str], dict[str, float]] = {}
    for node in nodes:
        for device in node.devices:
            for what, unit, value in _figures(device):
                groups.setdefault((device.type, what, unit), {})[f"{node.id}:{device.id}"] = value
    found: dict[str, list[Reason]] = {}
    for (_, what, unit), values in groups.items():
        for place, reasons in _below(values, slow_ratio, "SLOW_DEVICE", what, unit).items():
            node_name, _, device_name = place.partition(":")
            named = [Reason(code=reason.code, text=f"{device_name} {reason.text}") for reason in reasons]
            found.setdefault(node_name, []).extend(named)
    return found


def _figures(device: Device) -> Iterable[tuple[str, str, float]]:
    for dtype, value in device.flops.items():
        yield f"{dtype} matrix products", "FLOP/s", value
    if device.memory_bytes_per_s is not None:
        yield "memory bandwidth", "B/s", device.memory_bytes_per_s


def _below(values: dict[str, float], ratio: float, code: str, what: str, unit: str) -> dict[str, list[Reason]]:
    if len(values) < 2:
        return {}  # nothing to compare with
    middle = statistics.median(values.values())
    return {
        name: [
            Reason(
                code=code,
                text=f"{what} {format_si(value, unit)} is {value / middle:.0%} of the median {format_si(middle, unit)}",
            )
        ]
        for name, value in values.items()
        if value < ratio * middle
    }
