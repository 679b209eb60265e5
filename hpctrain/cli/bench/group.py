"""The command group `hpctrain bench`, and its commands `runtime`, `checkpoint`, `agreement`, `plan` and
`probe`."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.table import Table

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_FAILED, InputError
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_bytes, format_seconds, format_si
from hpctrain.cli.bench.compression import compression
from hpctrain.cli.bench.lab import on_lab
from hpctrain.cli.bench.output import bench_console, check_kind, check_rates, echo_json, machine_text, say
from hpctrain.cli.bench.recovery import recovery
from hpctrain.cli.views.console import Console


@click.command("plan")
@click.option(
    "--search-limit",
    "search_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds after which a case of the searches is given up.",
)
@click.option("--own", is_flag=True, help="Instead: train small plans of two workers here, and fit a profile to some.")
@click.option("--placement", is_flag=True, help="Instead: predict plans, and the same placed without knowledge.")
@click.option("--steps", type=click.IntRange(15), default=40, help="With --own: steps that each plan trains.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def plan(search_limit_s: float, own: bool, placement: bool, steps: int, as_json: bool) -> None:
    """Measure the planner's searches: their time, the gap of the plans to the bound, and the time to plan again after
    the loss of a node.

    With --own: compare the planner's predictions with runs on this machine's processors, before and after a profile is
    fitted to some of the runs. With --placement: predict, by the cost model alone, the gain from knowing devices and
    links on clusters of 32 GPUs.
    """
    if own and placement:
        raise InputError("--placement: not with --own")
    kind = "own" if own else "placement" if placement else None
    check_kind(kind, {"search_limit_s": ("--search-limit", None), "steps": ("--steps", "own")})
    people = bench_console(as_json, 120 if own else 140)
    if own:
        from hpctrain.bench.planner import own_runs

        record = own_runs.measure(SystemRunner(), SystemClock(), own_runs.OwnRunSettings(steps=steps), say)
        show_own_runs(record, people)
    elif placement:
        from hpctrain.bench.planner import placement as gain

        record = gain.measure(say)
        show_placement(record, people)
    else:
        from hpctrain.bench.planner import search

        record = search.measure(SystemRunner(), search_limit_s, say)
        show(record, people)
    echo_json(record, as_json)


def show(record: dict[str, Any], console: Console) -> None:
    """Print the table of searches, each search that did not end with the reason, how much slower the planner's plan of
    a small problem is than the best of all plans, and the machine.

    Args:
        record: the record that `measure` of `hpctrain.bench.planner.search` returned.
    """
    if record["searches"]:
        console.print(_searches(record))
    sentences = [f"search {name}: {reason}" for name, reason in record["search_unfinished"].items()]
    sentences.append(f"against every plan of a small problem: {record['gap_pct']:.2f} % slower than the best")
    sentences.append(machine_text(record, python="Python"))
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def show_placement(record: dict[str, Any], console: Console) -> None:
    """Print the predicted step of each plan, and how much slower the step is if a plan of the same degrees takes the
    devices in the order in which the nodes are listed, or in random orders. `record` is that of
    `hpctrain.bench.planner.placement.measure`.
    """
    orders = record["settings"]["orders"]
    table = Table(
        "machines and model", "plan", "step", "nodes as listed", f"{orders} random orders: median", "least", "most",
        title="predicted step of the plan, and with its degrees placed without knowledge of devices and links",
    )  # fmt: skip
    for row in record["rows"]:
        planned = row["planned_s"]
        others = [row.get("listed_s"), *row.get("shuffled_s", (None, None, None))]
        slower = ["does not fit" if step_s is None else f"{100 * (step_s / planned - 1):+.1f} %" for step_s in others]
        table.add_row(row["case"], row["plan"], format_seconds(planned), *slower)
    console.print(table)


def _searches(record: dict[str, Any]) -> Table:
    table = Table(
        "machines and model", "step, s", "gap at most, %", "search, s", "a node lost: again, s", "blocks sent",
        "with compression auto, s", "blocks sent", title="searches, in processor time",
    )  # fmt: skip
    for name, search in record["searches"].items():
        lost = [text for key in ("lost", "lost_auto") for text in _loss(search.get(key))]
        table.add_row(name, f"{search['step_s']:.3g}", f"{search['gap_pct']:.1f}", f"{search['search_s']:.2f}", *lost)
    return table


def _loss(replan: dict[str, Any] | None) -> tuple[str, str]:
    """Return two texts about planning again without a lost node: the CPU seconds that it took ('1.23'), and how
    many blocks are sent to other devices, of all that the devices of the new plan hold ('3 of 24').

    Both are '' if `replan` is None, as for a problem of one node.
    """
    if replan is None:
        return "", ""
    return f"{replan['replan_s']:.2f}", f"{replan['sent_blocks']} of {replan['held_blocks']}"


def show_own_runs(record: dict[str, Any], console: Console) -> None:
    """Print each run with the errors of its predicted time and memory, without and with the fitted profile; then the
    mean errors over the runs to which the profile was not fitted. `record` is that of
    `hpctrain.bench.planner.own_runs.measure`.
    """
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
    console.print(machine_text(record, torch="torch"), soft_wrap=True)


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


for _command in (plan, probe, compression, recovery):
    bench_command.add_command(_command)
