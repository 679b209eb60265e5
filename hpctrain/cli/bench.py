"""`hpctrain bench`: side-by-side measurements on this machine."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hpctrain.base.errors import EXIT_FAILED, InputError
from hpctrain.base.units import format_seconds

RUNTIME_CASES = ("one_process", "dp2", "pp2")


@click.group("bench")
def command() -> None:
    """Side-by-side measurements: ours and another in turns, the ratio and how sure it is.

    Nothing else should run on the machine meanwhile; the load that was there is recorded beside the result.
    """


@command.command("runtime")
@click.option("--pairs", type=click.IntRange(min=2), default=30, show_default=True, help="Pairs measured of each case.")
@click.option(
    "--case", "cases", multiple=True, type=click.Choice(RUNTIME_CASES), help="Only this case; may be given again."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def runtime(pairs: int, cases: tuple[str, ...], as_json: bool) -> None:
    """The training runtime against the same work written by hand in torch, on CPU processes of this machine."""
    from hpctrain.bench.runtime import Settings, measure

    record = measure(cases or RUNTIME_CASES, Settings(pairs=pairs), _say)
    _show(record, as_json)


@command.command("checkpoint")
@click.option(
    "--rounds", type=click.IntRange(min=2), default=10, show_default=True, help="Rounds of saves in each way."
)
@click.option(
    "--kills", type=click.IntRange(min=1), help="Instead: kill a training that always saves so many times, and look."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def checkpoint(rounds: int, kills: int | None, as_json: bool) -> None:
    """What a save costs the training, against saving and waiting and against torch's own ways.

    With --kills: exit code 1 when a checkpoint was lost, corrupt or older than the one before.
    """
    if kills is not None:
        _kill(kills, as_json)
        return
    from hpctrain.bench.checkpoint import Settings, measure

    _show(measure(Settings(rounds=rounds), _say), as_json)


@command.command("probe")
@click.option("--simulated", is_flag=True, help="On a simulated fabric and clock, up to 1,000 nodes.")
@click.option("--runs", type=click.IntRange(1), default=1000, show_default=True, help="Seeded runs of each health row.")
@click.option("--nodes", "sizes", type=click.IntRange(8), multiple=True, help="Size to time; may be given again.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def probe(simulated: bool, runs: int, sizes: tuple[int, ...], as_json: bool) -> None:
    """The probe's own quality: how often it calls a good node slow, what it finds, how long it takes."""
    if not simulated:
        raise InputError("bench probe: give --simulated")
    from hpctrain.bench.probe_simulated import Plan, simulate

    record = simulate(Plan(runs=runs, sizes=sizes or Plan.sizes), _say)
    people = Console(stderr=as_json, highlight=False, width=None if sys.stdout.isatty() else 120)
    for name in ("health", "switches", "runtime"):
        rows = record[name]
        table = Table(*rows[0], title=name, title_justify="left")
        for row in rows:
            table.add_row(*(f"{value:.5g}" if isinstance(value, float) else str(value) for value in row.values()))
        people.print(table)
    if as_json:
        click.echo(json.dumps(record, indent=1))


def _kill(count: int, as_json: bool) -> None:
    from hpctrain.bench.kills import measure_kills

    record = measure_kills(count, _say)
    found = record["kills"]
    click.echo(
        f"{found['kills']} kills, {found['while_writing']} of them while a checkpoint was being written: "
        f"{found['lost']} lost, {len(found['corrupt'])} corrupt, {found['older']} older than the one before",
        err=as_json,
    )
    if as_json:
        click.echo(json.dumps(record, indent=1))
    if found["lost"] or found["corrupt"] or found["older"]:
        sys.exit(EXIT_FAILED)


def _say(what: str) -> None:
    click.echo(f"measuring {what}", err=True)


def _show(record: dict[str, Any], as_json: bool) -> None:
    people = Console(stderr=as_json, highlight=False, width=None if sys.stdout.isatty() else 120)
    people.print(_table(record))
    machine, versions = record["machine"], record["versions"]
    people.print(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']} when it ended; "
        f"torch {versions['torch']}, Python {versions['python']}",
        soft_wrap=True,
    )
    if as_json:
        click.echo(json.dumps(record, indent=1))


def _table(record: dict[str, Any]) -> Table:
    title = f"bench {record['bench']}: median of pairs, 90 % interval"
    table = Table("case", "ratio", "90 %", "ours", "other", "CPU ours", "CPU other", "pairs", "against", title=title)
    for row in record["rows"]:
        cpu = [format_seconds(row[key]) if key in row else "" for key in ("ours_cpu_s", "other_cpu_s")]
        table.add_row(
            row["case"], f"{row['ratio']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}",
            format_seconds(row["ours_s"]), format_seconds(row["other_s"]), *cpu, str(row["pairs"]), row["against"],
        )  # fmt: skip
    return table
