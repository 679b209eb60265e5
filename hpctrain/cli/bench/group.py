"""`hpctrain bench`: side-by-side measurements on this machine."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.table import Table

from hpctrain.base.errors import EXIT_FAILED
from hpctrain.base.units import format_seconds
from hpctrain.cli.bench.compression import compression
from hpctrain.cli.bench.output import bench_console, echo_json, machine_text, say
from hpctrain.cli.bench.plan import plan
from hpctrain.cli.bench.probe import probe

RUNTIME_CASES = ("one_process", "dp2", "pp2")


@click.group("bench")
def bench_command() -> None:
    """Side-by-side measurements: hpctrain and another implementation in turns, their ratio and its uncertainty.

    Run nothing else on the machine meanwhile; the load of the machine is recorded beside the result.
    """


@bench_command.command("runtime")
@click.option("--pairs", type=click.IntRange(min=2), default=30, help="Pairs measured of each case.")
@click.option(
    "--case", "cases", multiple=True, type=click.Choice(RUNTIME_CASES), help="Only this case; may be given again."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def runtime(pairs: int, cases: tuple[str, ...], as_json: bool) -> None:
    """Compare the training runtime with the same work written by hand in torch, on CPU processes of this machine."""
    from hpctrain.bench.runtime import ThroughputSettings, measure

    record = measure(cases or RUNTIME_CASES, ThroughputSettings(pairs=pairs), say)
    _show(record, as_json)


@bench_command.command("checkpoint")
@click.option("--rounds", type=click.IntRange(min=2), default=10, help="Rounds of saves in each way.")
@click.option(
    "--kills", type=click.IntRange(min=1), help="Instead: kill a training that always saves so many times, and look."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def checkpoint(rounds: int, kills: int | None, as_json: bool) -> None:
    """Measure how long a save stalls the training, compared with a save that is waited for and with torch's two saves.

    With --kills: exit code 1 when a checkpoint was lost, corrupt or older than the one before the kill.
    """
    if kills is not None:
        _kill(kills, as_json)
        return
    from hpctrain.bench.recovery.checkpoint import SaveSettings, measure

    _show(measure(SaveSettings(rounds=rounds), say), as_json)


def _kill(count: int, as_json: bool) -> None:
    from hpctrain.bench.recovery.kills import measure_kills

    record = measure_kills(count, say)
    kills = record["kills"]
    click.echo(
        f"{kills['kills']} kills, {kills['while_writing']} of them while a checkpoint was being written: "
        f"{kills['lost']} lost, {len(kills['corrupt'])} corrupt, {kills['older']} older than the one before",
        err=as_json,
    )
    echo_json(record, as_json)
    if kills["lost"] or kills["corrupt"] or kills["older"]:
        sys.exit(EXIT_FAILED)


def _show(record: dict[str, Any], as_json: bool) -> None:
    people = bench_console(as_json)
    people.print(_table(record))
    people.print(machine_text(record, torch="torch", python="Python"), soft_wrap=True)
    echo_json(record, as_json)


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


for _command in (plan, probe, compression):
    bench_command.add_command(_command)
