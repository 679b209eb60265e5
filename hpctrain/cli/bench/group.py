"""The command group `hpctrain bench`, and its commands `runtime`, `checkpoint`, `agreement`, `plan` and
`probe`."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.table import Table

from hpctrain.base.errors import EXIT_FAILED, InputError
from hpctrain.base.units import format_seconds, format_si
from hpctrain.cli.bench.adapt import adapt
from hpctrain.cli.bench.compression import compression
from hpctrain.cli.bench.lab import on_lab
from hpctrain.cli.bench.output import bench_console, check_kind, check_rates, echo_json, machine_text, say
from hpctrain.cli.bench.plan import plan
from hpctrain.cli.bench.recovery import recovery
from hpctrain.cli.bench.views import views
from hpctrain.cli.views.console import Console


@click.command("probe")
@click.option(
    "--rate", "rates", multiple=True, default=("50mbit", "200mbit", "1gbit"),
    help="Rate of the lab's links; may be given again.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Measurements of each rate.")
@click.option("--faults", is_flag=True, help="Instead: inject faults into the lab and see what the probe says.")
@click.option("--clean", type=click.IntRange(0), default=20, help="With --faults: probes without a fault.")
@click.option("--times", is_flag=True, help="Instead: time a probe of four nodes in a job, and of every pair.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def probe(rates: tuple[str, ...], repeats: int, faults: bool, clean: int, times: bool, as_json: bool) -> None:
    """Measure the probe itself: its bandwidth beside iperf3's. With --faults: the faults that it reports. With --times:
    how long it takes.

    The bench uses the lab that is up, and needs root. It shapes the lab's links to known rates, and the probe and
    iperf3 both measure them.

    Exit code 1: with --faults if a fault was not named rightly, or one was named where there was none; with --times if
    a pair of nodes was not measured.
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
    """Measure the bandwidth of the lab's links with the probe and with iperf3, print the table, and return the record.

    Args:
        rates: rates to which the links are shaped, one after the other, such as 50mbit.
        repeats: measurements of each rate.
    """
    from hpctrain.bench.probe.lab_probe import RateSettings, measure

    check_rates(rates)
    record = on_lab(measure, RateSettings(rates=rates, repeats=repeats))
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
    """Inject faults into the lab that is up, print what the probe reported of each, and return the record.

    Args:
        clean: number of further probes, without a fault.
    """
    from hpctrain.bench.probe.faults import measure_faults

    record = on_lab(measure_faults, clean)
    table = Table("fault", "expected", "found", "right", "time")
    for row in record["rows"]:
        codes, right = ", ".join(row["reported"]) or "nothing", "yes" if row["right"] else "no"
        table.add_row(row["case"], row["expected"], codes, right, f"{row['seconds']:.1f} s")
    people.print(table)
    runs, wrong = record["clean"]["runs"], record["clean"]["wrong"]
    people.print(f"{len(wrong)} of {runs} clean probes named a fault{': ' if wrong else ''}{wrong or ''}", markup=False)
    return record


def _time_probes(people: Console) -> dict[str, Any]:
    """Time whole probes of the lab that is up, print the table, and return the record."""
    from hpctrain.bench.probe.lab_probe import measure_times

    record = on_lab(measure_times)
    table = Table("probe", "time", "pairs measured", "said")
    for row in record["rows"]:
        codes = ", ".join(row["codes"]) or "nothing"
        table.add_row(row["case"], f"{row['seconds']:.1f} s", f"{row['complete']} of {row['pairs']}", codes)
    people.print(table)
    return record


RUNTIME_CASES = ("one_process", "dp2", "pp2", "layers", "layers_dp2")


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
    """Compare hpctrain's training steps with the same work written by hand in torch, on CPU processes of this
    machine."""
    from hpctrain.bench.runtime import ThroughputSettings, measure

    record = measure(cases or RUNTIME_CASES, ThroughputSettings(pairs=pairs), say)
    _show(record, as_json)


@bench_command.command("checkpoint")
@click.option("--rounds", type=click.IntRange(min=2), default=10, help="Rounds; each saves in every way once.")
@click.option(
    "--kills",
    type=click.IntRange(min=1),
    help="Instead: kill a saving training so many times, and check what it saved.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def checkpoint(rounds: int, kills: int | None, as_json: bool) -> None:
    """Measure how long a save in the background stalls the training, compared with a save that the training waits for
    and with torch's `dcp.save` and `dcp.async_save`, and how long loading takes when all ranks share the hashing.

    With --kills: exit code 1 if a checkpoint was lost, corrupt or older than the one before the kill.
    """
    if kills is not None:
        _kill(kills, as_json)
        return
    from hpctrain.bench.recovery.checkpoint import SaveSettings, measure

    _show(measure(SaveSettings(rounds=rounds), say), as_json)


@bench_command.command("agreement")
@click.option("--schedules", type=click.IntRange(min=1), default=100_000, show_default=True, help="Seeds to run.")
@click.option("--first", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Side by side.")
@click.option("--agents", type=click.IntRange(8), default=1000, show_default=True, help="Of the large job.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def agreement(schedules: int, first: int, processes: int, agents: int, as_json: bool) -> None:
    """Run the agents' own code on a simulated clock under seeded schedules of faults, and check what must always hold:
    no generation has two records, none begins without a quorum, and where a quorum stays connected, it trains.

    The schedules lose, repeat, delay and reorder messages, kill and pause agents between any two messages, cut nodes
    off, and let files hang or fail. Exit code 1: a schedule broke a rule; the bench prints its seed.
    """
    from hpctrain.bench.recovery.agreement import measure_agreement

    record = measure_agreement(schedules, first, processes, agents, say)
    people = bench_console(as_json)
    table = Table("schedules of the kind", "run", "faults", "generations", "broken", "back after the last fault")
    large = Table("lost of a large job", "agents", "agreed after", "entered by all after", "connections", "wall time")
    for row in record["rows"]:
        if "decided_s" in row:
            times = [format_seconds(row[key]) for key in ("decided_s", "entered_s", "wall_s")]
            large.add_row(row["case"], str(row["agents"]), *times[:2], str(row["neighbours"]), times[2])
            continue
        settled = [f"{row[key]:.1f} s" for key in ("settled_median_s", "settled_max_s") if key in row]
        back = f"{settled[0]} (at most {settled[1]})" if settled else ""
        table.add_row(
            row["case"], *(str(row[key]) for key in ("schedules", "faults", "generations", "broken")), back
        )  # fmt: skip
    people.print(table)
    if large.row_count:
        people.print(large)
    for violation in record["violations"]:
        people.print(violation, markup=False, soft_wrap=True)
    people.print(machine_text(record, python="Python"), soft_wrap=True)
    echo_json(record, as_json)
    if record["violations"]:
        sys.exit(EXIT_FAILED)


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


for _command in (plan, probe, compression, recovery, adapt, views):
    bench_command.add_command(_command)
