"""Which methods are worth their loss: a method is on the Pareto front if no other one has both a lower loss and fewer
bytes, or a shorter step. The charts are text that Markdown viewers draw (Mermaid)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpctrain.base.atomic import write_text
from hpctrain.bench.compression.convergence_summary import Summary

LABEL = 0.06
"""Share of a chart's axis that stays free at its ends, so that names of methods are not cut off."""


class TradeOff(NamedTuple):
    """A method by what it costs and by what it loses."""

    method: str
    cost: float
    """Bytes or seconds of a step; lower is better."""
    gap_pct: float
    """Gap of the last loss to that of exact sums, in percent; lower is better."""


def pareto_front(methods: Sequence[TradeOff]) -> list[TradeOff]:
    """Return the methods that no other one outdoes (is better in one figure and at least as good in the other), the
    cheapest first."""
    front: list[TradeOff] = []
    for method in sorted(methods, key=lambda one: (one.cost, one.gap_pct)):
        if not front or method.gap_pct < front[-1].gap_pct:
            front.append(method)
    return front


def write_pareto(target: Path, summaries: Sequence[Summary], rates: Mapping[float, str], parameters: int) -> None:
    """Write the page that `pareto_text` returns.

    Raises:
        StorageError: the file cannot be written.
    """
    write_text(target, pareto_text(summaries, rates, parameters))


def pareto_text(summaries: Sequence[Summary], rates: Mapping[float, str], parameters: int) -> str:
    """Return a Markdown page with a chart for the bytes of a step, and one for its time at each link rate, against the
    gap of the loss at equal steps. Methods whose bytes are not counted, or that have no loss, are left out.

    Args:
        rates: link rate in bits per second -> its name, as 100mbit.
        parameters: number of parameters of the model.
    """
    known = [one for one in summaries if one.gap_pct is not None and one.sent_bytes is not None]
    gaps = {one.method: one.gap_pct.mean for one in known if one.gap_pct is not None}
    sent = [TradeOff(one.method, (one.sent_bytes or 0.0) / parameters, gaps[one.method]) for one in known]
    charts = [_chart("Loss and bytes of a step", "B/parameter", sent)]
    for rate, name in rates.items():
        timed = [TradeOff(one.method, 1e3 * one.at_rate[rate].step_s, gaps[one.method]) for one in known]
        charts.append(_chart(f"Loss and time of a step at {name}", "ms", timed))
    return "\n".join(chart for chart in charts if chart)


def _chart(title: str, unit: str, methods: Sequence[TradeOff]) -> str:
    """Return a chart and the sentence that names its front; '' without methods.

    The axis of the cost is logarithmic, that of the gap linear.
    """
    if not methods:
        return ""
    costs, gaps = [math.log(one.cost) for one in methods], [one.gap_pct for one in methods]
    points = [
        f'    "{one.method}": [{_place(math.log(one.cost), costs):.3f}, {_place(one.gap_pct, gaps):.3f}]'
        for one in methods
    ]
    cheapest, dearest = min(one.cost for one in methods), max(one.cost for one in methods)
    front = ", ".join(f"`{one.method}` ({one.cost:.3g} {unit}, {one.gap_pct:+.2f} %)" for one in pareto_front(methods))
    return "\n".join([
        "```mermaid",
        "quadrantChart",
        f"    title {title}",
        f'    x-axis "{cheapest:.3g} {unit}" --> "{dearest:.3g} {unit}"',
        f'    y-axis "loss {min(gaps):+.2f} %" --> "loss {max(gaps):+.2f} %"',
        *points,
        "```",
        "",
        f"On the Pareto front, from the cheapest: {front}.",
        "",
    ])  # fmt: skip


def _place(value: float, values: Sequence[float]) -> float:
    """Return where a value lies on an axis, from 0 to 1."""
    low, high = min(values), max(values)
    share = (value - low) / (high - low) if high > low else 0.5
    return LABEL + (1 - 2 * LABEL) * share
