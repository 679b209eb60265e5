"""`hpctrain bench probe`: the measurements and their tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import click
from rich.table import Table

from hpctrain.base.errors import EXIT_FAILED, InputError
from hpctrain.base.units import format_si
from hpctrain.cli.bench.output import bench_console, check_kind, check_rates, echo_json, say
from hpctrain.cli.views.console import Console


@click.command("probe")
@click.option(
    "--rate", "rates", multiple=True, default=("50mbit", "200mbit", "1gbit"),
    help="Rate of the lab's links; may be given again.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Measurements of each rate.")
@click.option("--faults", is_flag=True, help="Rather inject faults into the lab and see what the probe says.")
@click.option("--clean", type=click.IntRange(0), default=20, help="With --faults: probes without a fault.")
@click.option("--times", is_flag=True, help="Rather time a probe of four nodes as a job, and of every pair of the lab.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def probe(rates: tuple[str, ...], repeats: int, faults: bool, clean: int, times: bool, as_json: bool) -> None:
    """Measure the probe itself: its bandwidth beside iperf3's, the faults that it reports, how long it takes.

    The lab that is up is used. Its links are shaped to known rates, and the probe and iperf3 both measure them. This
    needs root.

    Exit code 1: with --faults when a fault was not named rightly, or one was named where there was none; with --times
    when a pair of nodes was not measured.
    """
    if faults and times:
        raise InputError("--faults: not with --times")
    kind = "faults" if faults else "times" if times else None
    check_kind(kind, {"rates": ("--rate", None), "repeats": ("--repeats", None), "clean": ("--clean", "faults")})
    people = bench_console(as_json)
    if faults:
        record = _inject_faults(clean, people)
        passed = all(row["right"] for row in record["rows"]) and not record["clean"]["wrong"]
    elif times:
        record = _time_probes(people)
        passed = all(row["complete"] == row["pairs"] for row in record["rows"])
    else:
        record = _compare_with_iperf3(rates, repeats, people)
        passed = True
    echo_json(record, as_json)
    if not passed:
        sys.exit(EXIT_FAILED)


def _compare_with_iperf3(rates: tuple[str, ...], repeats: int, people: Console) -> dict[str, Any]:
    """Measure the probe and iperf3 on the lab that is up, print the table, return the record."""
    from hpctrain.bench.probe.lab_probe import RateSettings, measure

    check_rates(rates)
    record = _on_lab(measure, RateSettings(rates=rates, repeats=repeats))
    table = Table("rate", "ours", "iperf3", "error", "spread, ours and iperf3", "repeats bound by a processor")
    for row in record["rows"]:
        table.add_row(
            row["case"], format_si(row["ours_bytes_per_s"], "B/s"), format_si(row["iperf3_bytes_per_s"], "B/s"),
            f"{row['error_pct']:+.1f} %", f"{row['ours_spread_pct']:.1f} %, {row['iperf3_spread_pct']:.1f} %",
            f"{row['cpu_contended']} of {repeats}",
        )  # fmt: skip
    people.print(table)
    return record


def _inject_faults(clean: int, people: Console) -> dict[str, Any]:
    """Inject faults into the lab that is up, print what the probe reported, return the record."""
    from hpctrain.bench.probe.faults import measure_faults

    record = _on_lab(measure_faults, clean)
    table = Table("fault", "expected", "found", "right", "time")
    for row in record["rows"]:
        codes, right = ", ".join(row["reported"]) or "nothing", "yes" if row["right"] else "no"
        table.add_row(row["case"], row["expected"], codes, right, f"{row['seconds']:.1f} s")
    people.print(table)
    runs, wrong = record["clean"]["runs"], record["clean"]["wrong"]
    people.print(f"{len(wrong)} of {runs} clean probes named a fault{': ' if wrong else ''}{wrong or ''}", markup=False)
    return record


def _time_probes(people: Console) -> dict[str, Any]:
    """Time whole probes of the lab that is up, print the table, return the record."""
    from hpctrain.bench.probe.lab_probe import measure_times

    record = _on_lab(measure_times)
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
        return measure(machine, layout, *arguments, say)
