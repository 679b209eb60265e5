"""The curves of `hpctrain bench compression --convergence` as one HTML page that needs no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.base.atomic import write_text
from hpctrain.base.units import format_si
from hpctrain.bench.compression.convergence_summary import band, step_seconds
from hpctrain.report.render import plotly_script

PALETTE = ("#1f5fbf", "#c8502d", "#2b8a57", "#8a4fbf", "#b58a00", "#0f8b8d", "#a83279", "#5c6b7a")
FIRST_SHOWN = 0.05
"""Share of the steps at the beginning that the charts leave out, because all curves fall together there."""

Rows = Sequence[Mapping[str, Any]]


def write_page(target: Path, rows: Rows, rates: Sequence[float]) -> None:
    """Write a page with the loss over steps, and over time at each link rate. Bands are the 95 % interval of the mean
    over seeds.

    Args:
        rates: link rates in bits per second.

    Raises:
        InputError: plotly is not installed.
        StorageError: the file cannot be written.
    """
    script = plotly_script()
    charts = [("Validation loss by step", "step", _traces(rows, lambda row: 1.0))]
    for rate in rates:
        title = f"Validation loss by time at {format_si(rate, 'bit/s')}"
        charts.append((title, "s", _traces(rows, lambda row, rate=rate: step_seconds(row, rate))))  # type: ignore[misc]
    write_text(target, _page(charts, script))


def _traces(rows: Rows, scale: Callable[[Mapping[str, Any]], float | None]) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for index, name in enumerate(dict.fromkeys(row["method"] for row in rows)):
        curves = [row for row in rows if row["method"] == name and row["curve"]]
        scales = [value for row in curves if (value := scale(row)) is not None]
        if not curves or len(scales) < len(curves):
            continue
        steps = [step for step, _ in min((row["curve"] for row in curves), key=len)]
        shown = [step for step in steps if step >= FIRST_SHOWN * steps[-1]]
        losses = {step: [dict(map(tuple, row["curve"]))[step] for row in curves] for step in shown}
        bands = [band(losses[step]) for step in shown]
        x = [step * float(np.mean(scales)) for step in shown]
        middle = [one.mean for one in bands if one is not None]
        half = [one.half_width or 0.0 for one in bands if one is not None]
        colour = PALETTE[index % len(PALETTE)]
        line = {"color": colour, "width": 2, "dash": "solid" if index < len(PALETTE) else "dot"}
        traces.append({"type": "scatter", "mode": "lines", "name": name, "x": x, "y": middle, "line": line})
        if any(half):
            y = [m + h for m, h in zip(middle, half, strict=True)] + [
                m - h for m, h in zip(middle[::-1], half[::-1], strict=True)
            ]
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "x": x + x[::-1], "y": y, "fill": "toself",
                    "line": {"width": 0}, "fillcolor": colour + "26", "hoverinfo": "skip", "showlegend": False,
                }
            )  # fmt: skip
    return traces


def _page(charts: Sequence[tuple[str, str, list[dict[str, Any]]]], script: str) -> str:
    parts = []
    for index, (title, x_title, traces) in enumerate(charts):
        layout = {
            "height": 460, "margin": {"t": 20}, "xaxis": {"title": {"text": x_title}},
            "yaxis": {"title": {"text": "nats a token"}},
        }  # fmt: skip
        # "</" would end the script element.
        values = json.dumps([traces, layout]).replace("</", "<\\/")
        parts.append(
            f"<h2>{escape(title)}</h2><div id='c{index}'></div>"
            f"<script>Plotly.newPlot('c{index}', ...{values}, {{responsive: true}})</script>"
        )
    head = "<!doctype html><html lang='en'><meta charset='utf-8'><title>Compression and convergence</title>"
    style = "<style>body{font-family:system-ui,sans-serif;max-width:1100px;margin:2rem auto}</style>"
    return f"{head}{style}<script>{script}</script>{''.join(parts)}</html>"
