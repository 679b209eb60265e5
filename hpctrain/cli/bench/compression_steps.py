"""The tables of steps, and of pieces on a GPU, that `hpctrain bench compression` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from hpctrain.base.units import format_seconds, format_si
from hpctrain.cli.views.plan_explanation import sums_label


def steps_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of a record's rows, one for each method, link and number of nodes."""
    compares = any("late_ratio" in row for row in rows)
    table = Table(
        "link", "nodes", "method", "step", "quartiles", "mean", "CPU", "own core", "bytes/param", "counted", "loss",
        *(["of late sums"] if compares else []),
        title="A step of each method; CPU and bytes are means, for each node", title_justify="left",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["link"], f"{row['nodes']} × {row['devices']}" if row.get("devices", 1) > 1 else str(row["nodes"]),
            f"{row['method']} ({sums_label(row['choice'], row.get('choice_intra_node'))})" if "choice" in row
            else row["method"],
            format_seconds(row["step_time_s"]),
            f"{format_seconds(row['step_time_low_s'])} to {format_seconds(row['step_time_high_s'])}",
            format_seconds(row["step_time_mean_s"]), format_seconds(row["cpu_s"]),
            format_seconds(row["own_core_s"]) if "own_core_s" in row else "",
            f"{row['bytes_per_parameter']:.3f}",
            f"{row['counted_bytes_per_parameter']:.3f}" if "counted_bytes_per_parameter" in row else "",
            f"{row['loss']:.4f}" if "loss" in row else "not finite",
            *([_of_late(row)] if compares else []),
        )  # fmt: skip
    return table


def _of_late(row: dict[str, Any]) -> str:
    if "late_ratio" not in row:
        return ""
    return f"{row['late_ratio']:.3f} ({row['late_ratio_low']:.3f} to {row['late_ratio_high']:.3f})"


def gpu_pieces_table(name: str, rows: Sequence[Any], numbers: int) -> Table:
    """Return the table of the times to choose from a gradient of `numbers` numbers, on the GPU `name`."""
    table = Table(
        "density", "piece", "time", "least to most", "chosen", "of the gradient", "of a copy",
        title=f"Choosing from {format_si(numbers, 'numbers')} on {name}", title_justify="left",
        caption="of the gradient: its bytes once, by the time; of a copy: the copy's time by this one",
        caption_justify="left",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row.density:g}", row.piece, format_seconds(row.time_s),
            f"{format_seconds(row.low_s)} to {format_seconds(row.high_s)}", f"{row.chosen:.4f}",
            format_si(row.bytes_per_s, "B/s"), f"{row.share_of_copy:.0%}",
        )  # fmt: skip
    return table
