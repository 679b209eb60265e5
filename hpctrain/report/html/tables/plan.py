"""Tables about plans and devices."""

from __future__ import annotations

from hpctrain.base.units import format_bytes, format_seconds, format_si
from hpctrain.records.plan.options_text import memory_options_text
from hpctrain.records.plan.plan import Plan, Replica
from hpctrain.records.topology.topology import Device, Node, Topology
from hpctrain.report.html.run_view import PlanUse
from hpctrain.report.html.tables.words import ABSENT, of_many, plural

MOST_REPLICAS = 6
"""Most replicas that the table of a plan shows, each as a column."""
MOST_FULL_DEVICES = 12
"""Most devices in the table of predicted memory: those that need most."""
MOST_DEVICES = 48
"""Most rows of the table of devices; a page with thousands would be unreadable."""


def device_speed(device: Device) -> str:
    """Return the sustained FLOP/s of a device by data type, as text; a dash if none was measured."""
    return ", ".join(f"{format_si(value, 'FLOP/s')} {dtype}" for dtype, value in device.flops.items()) or ABSENT


def health_text(node: Node) -> str:
    """Return the health of a node with its reasons, as text."""
    reasons = "; ".join(reason.text for reason in node.health.reasons)
    return f"{node.health.verdict}: {reasons}" if reasons else node.health.verdict


def plan_summary(plan: Plan) -> str:
    """Return degrees, schedule, solver, memory options and codec of the gradients of a plan, as text."""
    text = (
        f"{plan.dims} on {plural(len(plan.nodes), 'node')}, "
        f"schedule {plan.schedule}, {plan.sequences} sequences a step, solver {plan.solver}"
    )
    codec = [] if plan.dp == 1 or plan.codec.exact else [f"compression {plan.codec.label}"]
    return ", ".join([text, *memory_options_text(plan), *codec])


def step_time(use: PlanUse) -> list[tuple[str, str]]:
    """Return rows (name, value) with the predicted parts of the step time, their total, the lower bound of the step
    time, and the measured median. A row without a known value is absent."""
    rows: list[tuple[str, str]] = []
    predicted = use.plan.predicted
    if predicted is not None:
        terms = {name: value for name, value in predicted.step_time_s.items() if value and name != "total"}
        rows += [(name.replace("_", " "), format_seconds(value)) for name, value in terms.items()]
        if "total" in predicted.step_time_s:
            rows.append(("predicted total", format_seconds(predicted.step_time_s["total"])))
        if predicted.useful_bound_s is not None:
            rows.append(("bound of the same model", format_seconds(predicted.useful_bound_s)))
    measured = use.step_time_s
    if measured is not None:
        total = predicted.step_time_s.get("total") if predicted else None
        rows.append(("measured (median)", f"{format_seconds(measured)}{_against(measured, total)}"))
    return rows


def memory(use: PlanUse) -> list[tuple[str, str]]:
    """Return rows (name, value) with the predicted peak memory of each device, or of the `MOST_FULL_DEVICES` that need
    most, and the largest measured peak of a worker."""
    predicted = use.plan.predicted.memory_bytes if use.plan.predicted else {}
    fullest = sorted(predicted.items(), key=lambda item: -item[1])[:MOST_FULL_DEVICES]
    shown = dict(fullest) if len(fullest) < len(predicted) else predicted
    rows: list[tuple[str, str]] = [(device, format_bytes(value)) for device, value in shown.items()]
    if left_out := of_many(len(rows), len(predicted), "devices"):
        rows.append((f"{left_out}, the fullest", ""))
    if use.memory_bytes is not None:
        largest = max(predicted.values(), default=None)
        rows.append(
            ("measured, largest worker", f"{format_bytes(use.memory_bytes)}{_against(use.memory_bytes, largest)}")
        )
    return rows


def _against(measured: float, predicted: float | None) -> str:
    """Return by how much a measurement differs from its prediction, as ' (12 % above the prediction)'; '' without a
    prediction.

    Args:
        measured: the measurement, in any unit.
        predicted: the prediction, in the same unit.
    """
    if not predicted:
        return ""
    off = measured / predicted - 1.0
    return f" ({abs(off):.0%} {'above' if off >= 0 else 'below'} the prediction)".replace("%", " %")


def block_range(layers: tuple[int, int]) -> str:
    """Return the blocks of a stage as text, such as 'blocks 0 to 3'.

    Args:
        layers: first block, and the one after the last.
    """
    start, stop = layers
    if start == stop:
        return "no block"
    return f"block {start}" if stop == start + 1 else f"blocks {start} to {stop - 1}"


def shown_replicas(plan: Plan) -> list[tuple[int, Replica]]:
    """Return (number, replica) of the replicas that the table of a plan shows: the first ones."""
    return list(enumerate(plan.replicas))[:MOST_REPLICAS]


def shown_devices(topology: Topology) -> list[tuple[Node, Device]]:
    """Return the devices that the table shows: of many, those of nodes that are not well first."""
    every = [(node, device) for node in topology.nodes for device in node.devices]
    if len(every) > MOST_DEVICES:
        every.sort(key=lambda item: item[0].health.verdict == "ok")
    return every[:MOST_DEVICES]


def devices_left_out(topology: Topology) -> str:
    """Return how many devices the table shows; '' if it shows all."""
    count = sum(len(node.devices) for node in topology.nodes)
    return of_many(min(count, MOST_DEVICES), count, "devices")
