"""`hpctrain topology`: read and compare topology files."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from hpctrain.base.units import format_bytes, format_seconds, format_si
from hpctrain.probe.compare import Difference, differences
from hpctrain.probe.view import ABSENT, render
from hpctrain.records.topology import Topology

_FILE = click.Path(path_type=Path)


@click.group()
def command() -> None:
    """Read and compare topology files."""


@command.command()
@click.argument("file", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the checked file as JSON.")
def show(file: Path, as_json: bool) -> None:
    """Devices, the matrix of latency and bandwidth, and the verdict in FILE."""
    topology = Topology.read(file)
    if as_json:
        click.echo(json.dumps(topology.to_json(), indent=1))
        return
    Console().print(render(topology))


@command.command()
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=0.1,
    show_default=True,
    help="Differences up to this share of the earlier value are left out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
def diff(before: Path, after: Path, tolerance: float, as_json: bool) -> None:
    """What changed from BEFORE to AFTER."""
    found = differences(Topology.read(before), Topology.read(after), tolerance)
    if as_json:
        rows = [{"what": d.what, "unit": d.unit, "before": d.before, "after": d.after} for d in found]
        click.echo(json.dumps({"differences": rows}, indent=1))
        return
    if not found:
        click.echo(f"no figure differs by more than {tolerance:.0%}")
        return
    Console().print(_table(found))


def _table(found: list[Difference]) -> Table:
    table = Table("what")
    for heading in ("before", "after", "ratio"):
        table.add_column(heading, justify="right")
    for entry in found:
        ratio = ABSENT if entry.ratio is None else f"{entry.ratio:.2f}"
        table.add_row(entry.what, _value(entry.before, entry.unit), _value(entry.after, entry.unit), ratio)
    return table


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return ABSENT
    if unit == "s":
        return format_seconds(value)
    return format_bytes(value) if unit == "B" else format_si(value, unit)
