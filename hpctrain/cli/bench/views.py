"""The command `hpctrain bench views`."""

from __future__ import annotations

import click
from rich.table import Table

from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_seconds
from hpctrain.cli.bench.output import bench_console, echo_json, machine_text, say


@click.command("views")
@click.option("--runs", multiple=True, type=click.IntRange(1, 9999), default=(300, 3000), help="Ended runs of a list.")
@click.option("--steps", type=click.IntRange(min=1), default=100_000, show_default=True, help="Of the watched run.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Times to list again.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def views(runs: tuple[int, ...], steps: int, repeats: int, as_json: bool) -> None:
    """Measure the CPU time of `hpctrain list` with many ended runs, the first time and again, and of `hpctrain watch`
    on a long run of 64 ranks, when it begins and in each further second.

    The runs are made up, in a temporary folder.
    """
    from hpctrain.bench.views import measure

    record = measure(SystemRunner(), runs, steps, repeats, say)
    table = Table("view", "first", "again")
    for row in record["rows"]:
        table.add_row(row["case"], format_seconds(row["first_s"]), format_seconds(row["again_s"]))
    people = bench_console(as_json)
    people.print(table)
    people.print(machine_text(record, python="Python"), soft_wrap=True)
    echo_json(record, as_json)
