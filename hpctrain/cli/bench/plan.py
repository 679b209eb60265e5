"""`hpctrain bench plan`: the measurements of the planner and their tables."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_bytes, format_seconds
from hpctrain.cli.bench.output import bench_console, check_kind, echo_json, machine_text, say
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
@click.option("--own", is_flag=True, help="Rather train small plans of two workers here, and fit a profile to some.")
@click.option("--placement", is_flag=True, help="Rather predict plans beside the same ones placed without knowledge.")
@click.option("--steps", type=click.IntRange(15), default=40, help="With --own: steps that each plan trains.")
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
    """Print the searches, and the gap of the planner's plan to the best plan of a small problem."""
    if record["searches"]:
        console.print(_searches(record))
    sentences = [f"search {name}: {reason}" for name, reason in record["search_unfinished"].items()]
    sentences.append(f"against every plan of a small problem: {record['gap_pct']:.2f} % slower than the best")
    sentences.append(machine_text(record, python="Python"))
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def show_placement(record: dict[str, Any], console: Console) -> None:
    """Print predicted steps with and without placement."""
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
    """Return processor time and moved state of a replan, as text; both are empty where a case has one node."""
    if replan is None:
        return "", ""
    return f"{replan['replan_s']:.2f}", f"{replan['sent_blocks']} of {replan['held_blocks']}"


def show_own_runs(record: dict[str, Any], console: Console) -> None:
    """Print every run with its errors before and after the fit, then the mean errors."""
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
