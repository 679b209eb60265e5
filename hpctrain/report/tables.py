"""The tables of a report, with every number as text, so that the page only lays them out."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.base.units import format_bytes, format_count, format_delta, format_seconds, format_si
from hpctrain.records.history.event import Event
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import Device, Topology
from hpctrain.report.event_text import describe_event
from hpctrain.report.recoveries import FAULTS
from hpctrain.report.run_view import PlanUse, RunView
from hpctrain.report.validation import loss_words

ABSENT = "–"


@dataclass(frozen=True)
class HeadlineFigure:
    """One figure at the top: a label, a value and a note."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True)
class TimelineEntry:
    """One line of the timeline."""

    at: str
    """Time since the start of the run."""
    kind: str
    mood: str
    """How the page marks the line: fault, good or plain."""
    text: str
    reason: str
    generation: str
    node: str


@dataclass(frozen=True)
class DeviceRow:
    """One measured device."""

    node: str
    device: str
    name: str
    flops: str
    memory: str
    copies: str
    verdict: str


@dataclass(frozen=True)
class PlanTable:
    """A plan as text."""

    file: str
    generations: str
    summary: str
    stages: list[tuple[str, str]]
    """Blocks and recomputation of each stage."""
    replicas: list[tuple[str, list[str]]]
    """Share of the batch, and devices by stage, of each replica."""
    step_time: list[tuple[str, str]]
    """Predicted parts of the step time, their total, and the measured time."""
    memory: list[tuple[str, str]]
    """Predicted peak by device, and the measured one."""
    placement: list[tuple[str, str, str, str, str]]
    """What each rank ran: rank, device, stages, blocks, micro-batches."""
    rejected: list[tuple[str, str, str]]
    """Rejected neighbours: the change, how much slower, why it lost."""
    notes: list[str]


def headline(view: RunView) -> list[HeadlineFigure]:
    """The figures at the top of the page."""
    status, top = view.status, view.headline
    steady = "median, without first steps"
    figures = [
        HeadlineFigure("Steps", f"{status.step} of {status.steps}", _time_left(view)),
        HeadlineFigure("Loss", _number(status.loss), ", ".join(loss_words(status.valid_losses))),
        HeadlineFigure(
            "Throughput", f"{format_count(top.tokens_per_s)} tokens/s" if top.tokens_per_s else ABSENT, steady
        ),
        HeadlineFigure("Step time", _seconds(top.step_time_s), steady),
        HeadlineFigure("Time", _seconds(top.elapsed_s), "from the first line written to the last"),
        HeadlineFigure("Tokens", format_count(top.tokens), "in the steps that count"),
        HeadlineFigure("Recoveries", str(status.recoveries), _recovery_times(view)),
        HeadlineFigure("Lost steps", str(top.lost_steps), "done twice because of a fault"),
    ]
    if top.robustness is not None:
        score, steps = top.robustness
        figures.append(HeadlineFigure("Robustness", f"{score:.3f}", f"1 − std/mean of step time, last {steps} steps"))
    return figures


def timeline(view: RunView) -> list[TimelineEntry]:
    """The events as sentences, in file order."""
    start = view.start_s or 0.0
    return [_moment(event, start) for event in view.events]


def devices(topology: Topology) -> list[DeviceRow]:
    """One row per device."""
    rows = []
    for node in topology.nodes:
        reasons = "; ".join(reason.text for reason in node.health.reasons)
        verdict = f"{node.health.verdict}: {reasons}" if reasons else node.health.verdict
        rows += [
            _device_row(node.id, device, topology.device_types[device.type].name, verdict) for device in node.devices
        ]
    return rows


def plan_table(use: PlanUse) -> PlanTable:
    """A plan with the measurements while it was in use."""
    plan = use.plan
    generations = ", ".join(str(number) for number in use.generations)
    return PlanTable(
        file=use.file,
        generations=f"generation {generations}" if generations else "not run",
        summary=_summary(plan),
        stages=[(_span(stage.layers), stage.recompute) for stage in plan.stages],
        replicas=[
            (
                f"{_plural(replica.micro_batches, 'micro-batch', 'es')} of {replica.micro_batch}",
                [", ".join(row) for row in replica.devices],
            )
            for replica in plan.replicas
        ],
        step_time=_step_time(use),
        memory=_memory(use),
        placement=[
            (
                str(item.rank),
                item.device,
                ", ".join(map(str, item.stages)),
                ", ".join(map(str, item.layers)) or "none",
                f"{item.micro_batches} of {item.micro_batch}",
            )
            for item in use.placement
        ],
        rejected=[
            (item.change, format_delta(item.delta_s) if item.delta_s is not None else "cannot run", item.reason)
            for item in plan.rejected
        ],
        notes=plan.notes,
    )


def _summary(plan: Plan) -> str:
    text = (
        f"{plan.dims} on {_plural(len(plan.nodes), 'node')}, "
        f"schedule {plan.schedule}, {plan.sequences} sequences a step, solver {plan.solver}"
    )
    return ", ".join([text, *plan.memory_options_text])


def _step_time(use: PlanUse) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    predicted = use.plan.predicted
    if predicted is not None:
        terms = {name: value for name, value in predicted.step_time_s.items() if value and name != "total"}
        rows += [(name.replace("_", " "), format_seconds(value)) for name, value in terms.items()]
        if "total" in predicted.step_time_s:
            rows.append(("predicted total", format_seconds(predicted.step_time_s["total"])))
        if predicted.bound_s is not None:
            rows.append(("bound of the same model", format_seconds(predicted.bound_s)))
    measured = use.step_time_s
    if measured is not None:
        total = predicted.step_time_s.get("total") if predicted else None
        rows.append(("measured (median)", f"{format_seconds(measured)}{_against(measured, total)}"))
    return rows


def _memory(use: PlanUse) -> list[tuple[str, str]]:
    predicted = use.plan.predicted.memory_bytes if use.plan.predicted else {}
    rows: list[tuple[str, str]] = [(device, format_bytes(value)) for device, value in predicted.items()]
    if use.memory_bytes is not None:
        largest = max(predicted.values(), default=None)
        rows.append(
            ("measured, largest worker", f"{format_bytes(use.memory_bytes)}{_against(use.memory_bytes, largest)}")
        )
    return rows


def _against(measured: float, predicted: float | None) -> str:
    """Difference of a measurement from its prediction: ' (12 % above the prediction)'."""
    if not predicted:
        return ""
    off = measured / predicted - 1.0
    return f" ({abs(off):.0%} {'above' if off >= 0 else 'below'} the prediction)".replace("%", " %")


def _moment(event: Event, start: float) -> TimelineEntry:
    text = describe_event(event)
    mood = "fault" if event.kind in (*FAULTS, "failed") else "good" if event.kind in ("recovered", "finished") else ""
    reason = event.reason if event.kind == "generation_started" else ""
    return TimelineEntry(
        f"+{format_seconds(event.time_s - start)}" if event.time_s > start else "start",
        event.kind.replace("_", " "),
        mood or "plain",
        text,
        reason,
        str(event.generation) if event.generation >= 0 else ABSENT,
        event.node,
    )


def _device_row(node: str, device: Device, name: str, verdict: str) -> DeviceRow:
    flops = ", ".join(f"{format_si(value, 'FLOP/s')} {dtype}" for dtype, value in device.flops.items())
    return DeviceRow(
        node,
        device.id,
        name,
        flops or ABSENT,
        format_bytes(device.memory_bytes) if device.memory_bytes is not None else ABSENT,
        format_si(device.memory_bytes_per_s, "B/s") if device.memory_bytes_per_s is not None else ABSENT,
        verdict,
    )


def _recovery_times(view: RunView) -> str:
    times = [recovery.seconds for recovery in view.recoveries if recovery.seconds is not None]
    if view.recoveries and not view.recoveries[-1].done:
        return "one is under way" if view.status.state == "recovering" else "the last fault was not recovered from"
    return f"slowest {format_seconds(max(times))}" if times else ""


def _time_left(view: RunView) -> str:
    return f"{format_seconds(view.status.eta_s)} left" if view.status.eta_s else ""


def _span(layers: tuple[int, int]) -> str:
    start, stop = layers
    if start == stop:
        return "no block"
    return f"block {start}" if stop == start + 1 else f"blocks {start} to {stop - 1}"


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f}"


def _seconds(value: float | None) -> str:
    return ABSENT if value is None else format_seconds(value)
