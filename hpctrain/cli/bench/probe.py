"""`hpctrain bench probe`: the measurements and their tables."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click
from rich.table import Table

from hpctrain.base.units import format_si
from hpctrain.cli.views.console import Console

Say = Callable[[str], None]


def beside_iperf3(rates: tuple[str, ...], repeats: int, people: Console, say: Say) -> dict[str, Any]:
    """Measure the probe and iperf3 on the lab that is up, print the table, return the record."""
    from hpctrain.bench.probe.lab import RateSettings, measure
    from hpctrain.lab.spec import rate_bits_per_s

    for rate in rates:
        try:
            rate_bits_per_s(rate)
        except ValueError as error:
            raise click.BadParameter(f"found {rate!r}; {error}", param_hint="--rate") from None
    record = _on_lab(measure, RateSettings(rates=rates, repeats=repeats), say)
    table = Table("rate", "ours", "iperf3", "error", "spread, ours and iperf3", "repeats bound by a processor")
    for row in record["rows"]:
        table.add_row(
            row["case"], format_si(row["ours_bytes_per_s"], "B/s"), format_si(row["iperf3_bytes_per_s"], "B/s"),
            f"{row['error_pct']:+.1f} %", f"{row['ours_spread_pct']:.1f} %, {row['iperf3_spread_pct']:.1f} %",
            f"{row['cpu_contended']} of {repeats}",
        )  # fmt: skip
    people.print(table)
    return record


def fault_tables(clean: int, people: Console, say: Say) -> dict[str, Any]:
    """Inject faults into the lab that is up, print what the probe reported, return the record."""
    from hpctrain.bench.probe.faults import measure_faults

    record = _on_lab(measure_faults, clean, say)
    table = Table("fault", "expected", "found", "right", "time")
    for row in record["rows"]:
        codes, right = ", ".join(row["reported"]) or "nothing", "yes" if row["right"] else "no"
        table.add_row(row["case"], row["expected"], codes, right, f"{row['seconds']:.1f} s")
    people.print(table)
    runs, wrong = record["clean"]["runs"], record["clean"]["wrong"]
    people.print(f"{len(wrong)} of {runs} clean probes named a fault{': ' if wrong else ''}{wrong or ''}", markup=False)
    return record


def time_table(people: Console, say: Say) -> dict[str, Any]:
    """Time whole probes of the lab that is up, print the table, return the record."""
    from hpctrain.bench.probe.times import measure_times

    record = _on_lab(measure_times, say)
    table = Table("probe", "time", "pairs measured", "said")
    for row in record["rows"]:
        codes = ", ".join(row["codes"]) or "nothing"
        table.add_row(row["case"], f"{row['seconds']:.1f} s", f"{row['complete']} of {row['pairs']}", codes)
    people.print(table)
    return record


def _on_lab(measure: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """Return what `measure` returns for the lab that is up; requires root, because links are changed."""
    from hpctrain.lab.layout import load_layout, state_folder
    from hpctrain.lab.machine import lab_lock, this_machine
    from hpctrain.lab.requirements import require_root

    machine = this_machine()
    require_root(machine, "shape")
    layout = load_layout(state_folder(os.environ))
    with lab_lock():
        return measure(machine, layout, *arguments)
