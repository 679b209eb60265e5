"""Prints the record of the comparison with published runs as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(record: dict[str, Any], console: Console) -> None:
    """Print the errors of step times and memory, the rankings, and the runs that were left out.

    Args:
        record: the result of `measure`.
    """
    console.print(_times(record))
    console.print(_kinds(record["kinds"]))
    low, middle, high = record["measured_by_predicted"]
    text = f"measured / predicted: {middle:.2f}; {low:.2f} to {high:.2f} for 8 of 10, each publication with one weight"
    console.print(text, soft_wrap=True)
    for card, (low, middle, high) in record["measured_by_predicted_of"].items():
        console.print(f"  {card}, its kinds left out of the fit: {middle:.2f}; {low:.2f} to {high:.2f}", soft_wrap=True)
    if record["memory_errors"]:
        console.print(_memory(record))
    if record["memory_fits"]:
        console.print(_memory_fits(record["memory_fits"]))
    if record["rankings"]:
        console.print(_rankings(record))
    if record["left_out"]:
        first = next(iter(record["left_out"].items()))
        console.print(f"{len(record['left_out'])} runs left out; the first, {first[0]}: {first[1]}", soft_wrap=True)
    if record["failed_runs"]:
        console.print(f"{record['failed_runs']} runs failed when they were measured and have no time", soft_wrap=True)


def _times(record: dict[str, Any]) -> Table:
    inside = record["error_in_sample_pct"]["by_problem"]
    simple = record["baseline"]["error_pct"]["by_problem"]
    table = Table(
        "problem", "runs", "mean", "largest", "bias", "in sample", "bubble only", "kind left out", "and one step",
        title="step time: error in % on runs that the constants were not fitted on",
    )  # fmt: skip
    for problem, each in record["errors"].items():
        table.add_row(
            problem, str(each["runs"]), f"{each['mean']:.1f}", f"{each['largest']:.1f}", f"{each['bias']:+.1f}",
            f"{inside[problem]:.1f}" if problem in inside else "", f"{simple[problem]:.1f}",
            *map(_percent, record["problems_of_kinds"].get(problem, ())),
        )  # fmt: skip
    return table


def _kinds(record: dict[str, Any]) -> Table:
    title = "step time: error in % on kinds of runs that the constants were not fitted on, without measured layers"
    table = Table("kind", "runs", "mean", "bias", "with one step", "with the worst step", title=title)
    for kind, each in record["by_kind"].items():
        errors = [_percent(each[key]) for key in ("one_step", "worst_step")]
        table.add_row(kind, str(each["runs"]), f"{each['free']:.1f}", f"{each['bias']:+.1f}", *errors)
    for name in ("median", "worst"):
        free, one_step = (record[key] and record[key][name] for key in ("free", "one_step"))
        table.add_row(name, "", _percent(free), "", _percent(one_step), "")
    return table


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _memory(record: dict[str, Any]) -> Table:
    table = Table("problem", "runs", "mean", "largest", "bias", "below", title="peak memory: error in %")
    for problem, each in record["memory_errors"].items():
        numbers = [f"{each[key]:.1f}" for key in ("mean", "largest")]
        table.add_row(problem, str(each["runs"]), *numbers, f"{each['bias']:+.1f}", f"{each['below']:.0f} % of runs")
    return table


def _memory_fits(record: dict[str, Any]) -> Table:
    title = f"peak memory: fits to a part of BigScience's runs; {record['halves_in_goal']:.0%} of halves in the goal"
    table = Table("fitted to", "process GB", "share of gaps", "other runs", "lowest %", "highest %", title=title)
    for part, each in record["fits"].items():
        errors = [f"{each[key]:+.1f}" for key in ("lowest_pct", "highest_pct")]
        table.add_row(part, f"{each['process_gb']:.1f}", f"{each['gap_share']:.2f}", str(each["others"]), *errors)
    return table


def _rankings(record: dict[str, Any]) -> Table:
    simple = record["baseline"]["rankings"]
    table = Table(
        "problem", "searches", "rank correlation", "regret %", "largest", "bubble only: correlation", "regret %",
        title="order of plans, and the top plan against the best measured one",
    )  # fmt: skip
    for problem, each in record["rankings"].items():
        other = simple[problem]
        table.add_row(
            problem, str(each["searches"]), f"{each['rank_correlation']:.3f}", f"{each['regret_pct']:.1f}",
            f"{each['largest_regret_pct']:.1f}", f"{other['rank_correlation']:.3f}", f"{other['regret_pct']:.1f}",
        )  # fmt: skip
    return table
