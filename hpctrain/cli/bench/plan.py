"""The command `hpctrain bench plan`."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_bytes, format_seconds
from hpctrain.cli.bench.lab import new_lab
from hpctrain.cli.bench.output import bench_console, check_kind, echo_json, machine_text, say
from hpctrain.cli.views.console import Console

OWN_STEPS_MIN = 15
"""Fewest steps of `--own`, because a profile needs steps after the warm-up."""
LAB_STEPS = 8
"""Steps of `--lab` if none are given."""


@click.command("plan")
@click.option(
    "--search-limit",
    "search_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds after which a case of the searches is given up.",
)
@click.option("--own", is_flag=True, help="Instead: train small plans of 2 or 4 workers, and fit a profile to some.")
@click.option("--placement", is_flag=True, help="Instead: predict plans, and the same placed without knowledge.")
@click.option("--lab", is_flag=True, help="Instead: train small plans on a lab with slow, shared links (needs root).")
@click.option(
    "--steps", type=click.IntRange(1), help="With --own: steps that each plan trains (30, at least 15); with --lab: 8."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def plan(search_limit_s: float, own: bool, placement: bool, lab: bool, steps: int | None, as_json: bool) -> None:
    """Measure the planner's searches: their time, the gap of the plans to the bound, and the time to plan again after
    the loss of a node.

    With --own: compare the planner's predictions with runs on this machine's processors, before and after a profile is
    fitted to some of the runs. With --placement: predict, by the cost model alone, the gain from knowing devices and
    links on clusters of 32 GPUs. With --lab: bring up a lab of two racks, whose nodes and uplinks carry the messages of
    several workers, and compare predictions with runs there.
    """
    kinds = [name for name, chosen in (("own", own), ("placement", placement), ("lab", lab)) if chosen]
    if len(kinds) > 1:
        raise InputError(f"--{kinds[1]}: not with --{kinds[0]}")
    kind = kinds[0] if kinds else None
    check_kind(kind, {"search_limit_s": ("--search-limit", None), "steps": ("--steps", "lab" if lab else "own")})
    people = bench_console(as_json, 120 if own else 140)
    if own:
        from hpctrain.bench.planner import own_runs

        steps = own_runs.OwnRunSettings.steps if steps is None else steps
        if steps < OWN_STEPS_MIN:
            raise InputError(f"--steps: found {steps}; with --own give at least {OWN_STEPS_MIN}")
        record = own_runs.measure(SystemRunner(), SystemClock(), own_runs.OwnRunSettings(steps=steps), say)
        show_own_runs(record, people)
    elif lab:
        from hpctrain.bench.planner import lab_runs

        with new_lab(lab_runs.LAB) as (machine, layout):
            record = lab_runs.measure(machine, layout, steps or LAB_STEPS, say)
        show_lab_runs(record, people)
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
        "machines and model", "step, s", "gap at most, %", "annealing, %", "search, s", "a node lost: again, s",
        "blocks sent", "with compression auto, s", "blocks sent", title="searches, in processor time",
    )  # fmt: skip
    for name, search in record["searches"].items():
        lost = [text for key in ("lost", "lost_auto") for text in _loss(search.get(key))]
        annealed = f"{search['annealed_pct']:.2f}" if "annealed_pct" in search else ""
        figures = (f"{search['step_s']:.3g}", f"{search['gap_pct']:.1f}", annealed, f"{search['search_s']:.2f}")
        table.add_row(name, *figures, *lost)
    return table


def _loss(replan: dict[str, Any] | None) -> tuple[str, str]:
    """Return two texts about planning again without a lost node: the CPU seconds that it took ('1.23'), and how
    many blocks are sent to other devices, of all that the devices of the new plan hold ('3 of 24').

    Both are '' if `replan` is None, as for a problem of one node.
    """
    if replan is None:
        return "", ""
    return f"{replan['replan_s']:.2f}", f"{replan['sent_blocks']} of {replan['held_blocks']}"


def show_lab_runs(record: dict[str, Any], console: Console) -> None:
    """Print the measured and the predicted step of each case of `record`, a record of
    `hpctrain.bench.planner.lab_runs.measure`, and the mean errors.
    """
    table = Table("run", "workers", "step", "predicted", "error %", "if nothing were shared", "error %")
    for row in record["rows"]:
        table.add_row(
            row["case"], str(row["workers"]), *(format_seconds(row[key]) for key in ("step_time_s", "predicted_s")),
            f"{row['error_pct']:+.1f}", format_seconds(row["unshared_s"]), f"{row['unshared_error_pct']:+.1f}",
        )  # fmt: skip
    console.print(table)
    shared, alone = record["error_pct"], record["unshared_error_pct"]
    console.print(
        f"mean error {shared['mean']:.1f} % (largest {shared['largest']:.1f} %); if nothing were shared "
        f"{alone['mean']:.1f} % (largest {alone['largest']:.1f} %)",
        soft_wrap=True,
    )
    console.print(machine_text(record, torch="torch"), soft_wrap=True)


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
