"""`hpctrain bench`: side-by-side measurements on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from hpctrain.base.errors import EXIT_FAILED, InputError
from hpctrain.base.units import format_seconds
from hpctrain.cli.views.console import Console

RUNTIME_CASES = ("one_process", "dp2", "pp2")

_PROBE_OPTIONS = {
    "rates": ("--rate", None),
    "repeats": ("--repeats", None),
    "clean": ("--clean", "faults"),
}
"""Options of `bench probe` that belong to one of its kinds: parameter -> (option, parameter of the kind). None is the
kind that compares with iperf3."""
_COMPRESSION_OPTIONS = {
    "--pieces": {"device"},
    "--convergence": {"rates", "seeds", "methods", "steps", "preset", "output"},
    "--lab": {"lab", "nodes", "rates", "methods", "steps", "together", "preset", "output", "activations"},
    "": {"nodes", "methods", "steps", "together", "preset", "output", "activations"},
}
"""Parameters that each kind of `bench compression` takes, by the option that selects the kind."""
_GIVEN = click.core.ParameterSource.COMMANDLINE


@click.group("bench")
def command() -> None:
    """Side-by-side measurements: hpctrain and another implementation in turns, their ratio and its uncertainty.

    Run nothing else on the machine meanwhile; the load of the machine is recorded beside the result.
    """


@command.command("runtime")
@click.option("--pairs", type=click.IntRange(min=2), default=30, show_default=True, help="Pairs measured of each case.")
@click.option(
    "--case", "cases", multiple=True, type=click.Choice(RUNTIME_CASES), help="Only this case; may be given again."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def runtime(pairs: int, cases: tuple[str, ...], as_json: bool) -> None:
    """Compare the training runtime with the same work written by hand in torch, on CPU processes of this machine."""
    from hpctrain.bench.runtime.throughput import ThroughputSettings, measure

    record = measure(cases or RUNTIME_CASES, ThroughputSettings(pairs=pairs), _say)
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
    """Measure how long a save stalls the training, compared with a save that is waited for and with torch's two saves.

    With --kills: exit code 1 when a checkpoint was lost, corrupt or older than the one before the kill.
    """
    if kills is not None:
        _kill(kills, as_json)
        return
    from hpctrain.bench.recovery.checkpoint import SaveSettings, measure

    _show(measure(SaveSettings(rounds=rounds), _say), as_json)


@command.command("plan")
@click.option(
    "--search-limit",
    "search_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds after which a case of the searches is given up.",
)
@click.option("--own", is_flag=True, help="Rather train small plans of two workers here, and fit a profile to some.")
@click.option("--placement", is_flag=True, help="Rather predict plans beside the same ones placed without knowledge.")
@click.option(
    "--steps", type=click.IntRange(15), default=40, show_default=True, help="With --own: steps that each plan trains."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def plan(search_limit_s: float, own: bool, placement: bool, steps: int, as_json: bool) -> None:
    """Measure the planner's searches: their time, the gap of the plans to the bound, and the replan after the loss of a
    node.

    With --own: compare its predictions with runs on this machine's processors, before and after a profile is fitted to
    some of the runs. With --placement: predict the gain from knowing devices and links on clusters of 32 GPUs, by the
    cost model alone.
    """
    if own and placement:
        raise InputError("--placement: not with --own")
    kind = "--own" if own else "--placement" if placement else None
    source = click.get_current_context().get_parameter_source
    if kind and source("search_limit_s") is _GIVEN:
        raise InputError(f"--search-limit: not with {kind}")
    if not own and source("steps") is _GIVEN:
        raise InputError("--steps: only with --own")
    if own:
        record = _own_plans(steps, _people(as_json))
    elif placement:
        record = _placed_plans(_people(as_json, 140))
    else:
        record = _timed_searches(search_limit_s, _people(as_json, 140))
    _echo_json(record, as_json)


def _timed_searches(search_limit_s: float, people: Console) -> dict[str, Any]:
    from hpctrain.base.process import SystemRunner
    from hpctrain.bench.planner.search import measure
    from hpctrain.cli.bench.plan import show

    record = measure(SystemRunner(), search_limit_s, _say)
    show(record, people)
    return record


def _placed_plans(people: Console) -> dict[str, Any]:
    from hpctrain.bench.planner.placement import measure
    from hpctrain.cli.bench.plan import show_placement

    record = measure(_say)
    show_placement(record, people)
    return record


def _own_plans(steps: int, people: Console) -> dict[str, Any]:
    from hpctrain.base.clock import SystemClock
    from hpctrain.base.process import SystemRunner
    from hpctrain.bench.planner.own_runs import OwnRunSettings, measure
    from hpctrain.cli.bench.plan_own import show

    record = measure(SystemRunner(), SystemClock(), OwnRunSettings(steps=steps), _say)
    show(record, people)
    return record


def _kill(count: int, as_json: bool) -> None:
    from hpctrain.bench.recovery.kills import measure_kills

    record = measure_kills(count, _say)
    kills = record["kills"]
    click.echo(
        f"{kills['kills']} kills, {kills['while_writing']} of them while a checkpoint was being written: "
        f"{kills['lost']} lost, {len(kills['corrupt'])} corrupt, {kills['older']} older than the one before",
        err=as_json,
    )
    _echo_json(record, as_json)
    if kills["lost"] or kills["corrupt"] or kills["older"]:
        sys.exit(EXIT_FAILED)


@command.command("probe")
@click.option(
    "--rate", "rates", multiple=True, default=("50mbit", "200mbit", "1gbit"), show_default=True,
    help="Rate of the lab's links; may be given again.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Measurements of each rate.")
@click.option("--faults", is_flag=True, help="Rather inject faults into the lab and see what the probe says.")
@click.option(
    "--clean", type=click.IntRange(0), default=20, show_default=True, help="With --faults: probes without a fault."
)
@click.option("--times", is_flag=True, help="Rather time a probe of four nodes as a job, and of every pair of the lab.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def probe(rates: tuple[str, ...], repeats: int, faults: bool, clean: int, times: bool, as_json: bool) -> None:
    """Measure the probe itself: its bandwidth beside iperf3's, the faults that it reports, how long it takes.

    The lab that is up is used. Its links are shaped to known rates, and the probe and iperf3 both measure them. This
    needs root.

    Exit code 1: with --faults when a fault was not named rightly, or one was named where there was none; with --times
    when a pair of nodes was not measured.
    """
    from hpctrain.cli.bench.probe import beside_iperf3, fault_tables, time_table

    if faults and times:
        raise InputError("--faults: not with --times")
    _check_options("faults" if faults else "times" if times else None)
    people = _people(as_json)
    if faults:
        record = fault_tables(clean, people, _say)
        passed = all(row["right"] for row in record["rows"]) and not record["clean"]["wrong"]
    elif times:
        record = time_table(people, _say)
        passed = all(row["complete"] == row["pairs"] for row in record["rows"])
    else:
        record = beside_iperf3(rates, repeats, people, _say)
        passed = True
    _echo_json(record, as_json)
    if not passed:
        sys.exit(EXIT_FAILED)


def _check_options(kind: str | None) -> None:
    """Check that no option of another kind of `bench probe` was given; None is the kind that compares with iperf3."""
    context = click.get_current_context()
    for name, (option, needed) in _PROBE_OPTIONS.items():
        if needed != kind and context.get_parameter_source(name) is _GIVEN:
            raise InputError(f"{option}: not with --{kind}" if needed is None else f"{option}: only with --{needed}")


@command.command("compression")
@click.option(
    "--lab", type=click.Path(path_type=Path),
    help="Spec of a lab to bring up for it, and to take down. Default: processes of this machine, on its loopback.",
)  # fmt: skip
@click.option(
    "--nodes", type=click.IntRange(2), multiple=True,
    help="Nodes in a row; may be given again.  [default: 4, and 8 in a lab that has them]",
)  # fmt: skip
@click.option(
    "--rate", "rates", multiple=True, default=("100mbit", "1gbit"), show_default=True,
    help="Rate of the lab's links, or of the network that --convergence simulates; may be given again.",
)  # fmt: skip
@click.option("--convergence", is_flag=True, help="Rather train with each method, and hold the losses side by side.")
@click.option(
    "--activations", is_flag=True,
    help="Rather a pipeline over the nodes, its messages in fp32, bf16 and int8.  [--nodes: 2 and 4 in a lab]",
)  # fmt: skip
@click.option("--pieces", is_flag=True, help="Rather what choosing and writing numbers costs, beside torch's top-k.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
    help="Of --pieces; auto: a GPU where torch finds one.",
)  # fmt: skip
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Seeds of each method.")
@click.option("--method", "methods", multiple=True, help="Only this method; may be given again.")
@click.option("--steps", type=click.IntRange(min=2), help="Steps of each row.  [default: 20; 2000 with --convergence]")
@click.option(
    "--together", type=click.IntRange(min=1),
    help="Methods that take turns in one launch, whose rows are kept when it ends; on slow links few.  [default: all]",
)  # fmt: skip
@click.option("--preset", help="A preset's model in place of one of 10.87 M parameters (0.68 M with --convergence).")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the rows; a bench that was ended goes on with those that are missing.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def compression(
    lab: Path | None, nodes: tuple[int, ...], rates: tuple[str, ...], methods: tuple[str, ...], steps: int | None,
    together: int | None, preset: str | None, output: Path | None, convergence: bool, activations: bool,
    pieces: bool, device: str, seeds: int, as_json: bool,
) -> None:  # fmt: skip
    """Measure ways of summing gradients in turns: time of a step, processor seconds, and bytes at the network
    interface.

    With --convergence: the loss after equally many steps and after equal time, with the gap to exact sums.
    """
    from hpctrain.cli.bench import compression as verbs

    asked = {"--pieces": pieces, "--convergence": convergence, "--lab": lab is not None}
    kind = next((name for name, wanted in asked.items() if wanted), "")
    context = click.get_current_context()
    given = [option for option in context.command.params if context.get_parameter_source(option.name or "") is _GIVEN]
    for option in given:
        if option.opts[-1] not in (kind, "--json") and option.name not in _COMPRESSION_OPTIONS[kind]:
            where = f"not with {kind}" if kind else "not without --lab, --convergence or --pieces"
            raise InputError(f"{option.opts[-1]}: {where}")
    verbs.check_rates(rates)
    people = _people(as_json, 140)
    if pieces:
        record = verbs.pieces(device, people)
    elif convergence:
        record = verbs.convergence(rates, methods, seeds, steps or 2000, preset, output, people, _say)
    else:
        record = verbs.steps(
            lab, nodes, rates, methods, steps or 20, together, preset, activations, output, people, _say
        )
    _echo_json(record, as_json)


def _say(what: str) -> None:
    click.echo(f"measuring {what}", err=True)


def _people(as_json: bool, width: int = 120) -> Console:
    """Return the console for tables; it prints on stderr when stdout holds JSON. `width` is in columns and counts where
    stdout is no terminal."""
    return Console(stderr=as_json, highlight=False, width=None if sys.stdout.isatty() else width)


def _echo_json(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(record, indent=1))


def _show(record: dict[str, Any], as_json: bool) -> None:
    people = _people(as_json)
    people.print(_table(record))
    machine, versions = record["machine"], record["versions"]
    people.print(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']} when it ended; "
        f"torch {versions['torch']}, Python {versions['python']}",
        soft_wrap=True,
    )
    _echo_json(record, as_json)


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
