"""Tables of the record of `hpctrain bench plan --own`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from hpctrain.base.units import format_bytes, format_seconds
from hpctrain.cli.views.console import Console


def show(record: dict[str, Any], console: Console) -> None:
    """Print every run with its errors before and after the fit, then the mean errors."""
    table = Table(
        "plan", "model", "step", "error %", "with profile", "peak", "error %", "with profile", "load", "",
        title=f"our own runs of {record['settings']['steps']} steps",
    )  # fmt: skip
    for row in record["rows"]:
        table.add_row(
            row["case"], row["model"], format_seconds(row["step_time_s"]),
            *(f"{row[key]:+.1f}" for key in ("error_pct", "profiled_error_pct")), format_bytes(row["peak_bytes"]),
            *(f"{row[key]:+.1f}" for key in ("memory_error_pct", "profiled_memory_error_pct")),
            str(row["load_1min"]), "fitted to" if row["fitted"] else "",
        )  # fmt: skip
    console.print(table)
    for words, key in (("step time", "error_pct"), ("peak memory", "memory_error_pct")):
        before, after = record[key]["before"], record[key]["after"]
        console.print(
            f"{words}, {before['runs']} runs not fitted to: mean error {before['mean']:.1f} %, with the profile "
            f"{after['mean']:.1f} % (largest {after['largest']:.1f} %); predicted below in {before['below']:.0f} % and "
            f"{after['below']:.0f} % of them",
            soft_wrap=True,
        )
    machine, versions = record["machine"], record["versions"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']} when it ended; torch "
        f"{versions['torch']}",
        soft_wrap=True,
    )
