"""The tables of a report, as rows of text, so that the page only lays them out."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.base.units import format_bytes, format_count, format_seconds, format_si
from hpctrain.records.history.provenance import attempt_values
from hpctrain.records.history.run_log import Event
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import Device, Node
from hpctrain.report.html.run_view import PlanUse, RunView
from hpctrain.report.rank_times import slowness
from hpctrain.report.summaries import FAULTS, loss_words, robustness, steady_mfu, steady_step_time, steady_tokens_per_s

ABSENT = "–"


def headline(view: RunView) -> list[tuple[str, str, str]]:
    """Return the figures at the top of the report, each as (label, value, note)."""
    status, steady = view.status, "median, without first steps"
    tokens_per_s, mfu = steady_tokens_per_s(view.rows), steady_mfu(view.rows)
    figures = [
        ("Steps", f"{status.step} of {status.steps}", f"{format_seconds(status.eta_s)} left" if status.eta_s else ""),
        ("Loss", or_absent(status.loss, "{:.4f}".format), ", ".join(loss_words(status.valid_losses))),
        ("Throughput", f"{format_count(tokens_per_s)} tokens/s" if tokens_per_s else ABSENT, steady),
        *([] if mfu is None else [("MFU", f"{mfu:.1%}", "share of the GPUs' data sheets, median")]),
        ("Step time", or_absent(steady_step_time(view.rows), format_seconds), steady),
        ("Time", or_absent(view.elapsed_s, format_seconds), "from the first line written to the last"),
        ("Tokens", format_count(sum(row.tokens for row in view.history)), "in the steps that count"),
        ("Recoveries", str(status.recoveries), _recovery_times(view)),
        ("Lost steps", str(status.lost_steps), "done twice because of a fault"),
    ]
    if (score := robustness(view.rows)) is not None:
        figures.append(("Robustness", f"{score[0]:.3f}", f"1 − std/mean of step time, last {score[1]} steps"))
    return figures


def submitted_with(view: RunView) -> list[tuple[str, str]]:
    """Return rows (name, value) about what the run was submitted with; [] for a run of an earlier hpctrain."""
    provenance = view.provenance
    if provenance is None:
        return []
    software, code, image = provenance.software, provenance.code, provenance.image
    uncommitted = ", with changes that were not committed" if code is not None and code.dirty else ""
    rows = [
        ("submitted", provenance.created),
        ("hpctrain", f"{software.hpctrain}{f' ({software.hpctrain_commit})' if software.hpctrain_commit else ''}"),
        ("your code", f"commit {code.commit}{uncommitted}" if code is not None else None),
        ("image", " ".join(filter(None, [image.path, image.id and f"(id {image.id})"])) if image is not None else None),
        ("Slurm", provenance.slurm),
        ("packages", f"{len(provenance.packages)}, in requirements.lock: pip install -r requirements.lock"),
    ]
    return [(name, value) for name, value in rows if value is not None]


MOST_RANKS = 64
"""Most ranks of the table of ranks; of more, those that compute longest are shown."""


def rank_rows(view: RunView) -> list[list[str]]:
    """Return rows (rank, device, stages, times of a step, times as long as its peers) of the ranks in the last steps,
    the one that computes longest first."""
    rows = sorted(view.rank_rows, key=lambda row: -row.compute_s)[:MOST_RANKS]
    return [
        [
            str(row.rank), row.device, ", ".join(map(str, row.stages)),
            *map(format_seconds, (row.compute_s, row.wait_pp_s, row.wait_dp_s, row.hidden_dp_s, row.wait_world_s)),
            or_absent(slowness(row, view.rank_rows), "{:.2f}".format),
        ]
        for row in rows
    ]  # fmt: skip


def software_by_attempt(view: RunView) -> tuple[list[int], list[tuple[str, list[str]]]]:
    """Return the numbers of the run's attempts, and rows (name, value in each attempt) of their nodes' software and
    devices; several values in an attempt name their nodes."""
    attempts = sorted({line.attempt for line in view.environments})
    columns = [attempt_values(view.environments, attempt) for attempt in attempts]
    names = dict.fromkeys(name for column in columns for name in column)
    return attempts, [(name, [column.get(name, ABSENT) for column in columns]) for name in names]


def or_absent(value: float | None, words: Callable[[float], str] = str) -> str:
    """Return a value as text by the function `words`; a dash for None."""
    return ABSENT if value is None else words(value)


def mood(event: Event) -> str:
    """Return the style in which the report shows an event: 'fault', 'good' or 'plain'."""
    if event.kind in (*FAULTS, "failed"):
        return "fault"
    return "good" if event.kind in ("recovered", "finished") else "plain"


def device_speed(device: Device) -> str:
    """Return the sustained FLOP/s of a device by data type, as text; a dash if none was measured."""
    return ", ".join(f"{format_si(value, 'FLOP/s')} {dtype}" for dtype, value in device.flops.items()) or ABSENT


def health_text(node: Node) -> str:
    """Return the health of a node with its reasons, as text."""
    reasons = "; ".join(reason.text for reason in node.health.reasons)
    return f"{node.health.verdict}: {reasons}" if reasons else node.health.verdict


def plan_summary(plan: Plan) -> str:
    """Return degrees, schedule, solver and memory options of a plan, as text."""
    text = (
        f"{plan.dims} on {plural(len(plan.nodes), 'node')}, "
        f"schedule {plan.schedule}, {plan.sequences} sequences a step, solver {plan.solver}"
    )
    return ", ".join([text, *plan.memory_options_text])


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
    """Return rows (name, value) with the predicted peak memory of each device, and the largest measured peak of a
    worker."""
    predicted = use.plan.predicted.memory_bytes if use.plan.predicted else {}
    rows: list[tuple[str, str]] = [(device, format_bytes(value)) for device, value in predicted.items()]
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


def _recovery_times(view: RunView) -> str:
    times = [recovery.seconds for recovery in view.recoveries if recovery.seconds is not None]
    if view.recoveries and not view.recoveries[-1].done:
        return "one is under way" if view.status.state == "recovering" else "the last fault was not recovered from"
    return f"slowest {format_seconds(max(times))}" if times else ""


def block_range(layers: tuple[int, int]) -> str:
    """Return the blocks of a stage as text, such as 'blocks 0 to 3'.

    Args:
        layers: first block, and the one after the last.
    """
    start, stop = layers
    if start == stop:
        return "no block"
    return f"block {start}" if stop == start + 1 else f"blocks {start} to {stop - 1}"


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun, which gets the ending unless the count is 1: '1 node', '2 nodes'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"
