"""How `hpctrain bench plan` shows its record to a person."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from hpctrain.base.units import format_seconds
from hpctrain.cli.views.console import Console


def show(record: dict[str, Any], console: Console) -> None:
    """Errors and rankings by problem, then what concerns the search."""
    console.print(_times(record))
    if record["memory_errors"]:
        console.print(_memory(record))
    if record["rankings"]:
        console.print(_rankings(record))
    if record.get("searches"):
        console.print(_searches(record))
    for text in _sentences(record):
        console.print(text, soft_wrap=True)


def show_placement(record: dict[str, Any], console: Console) -> None:
    """Predicted steps with and without placement."""
    orders = record["settings"]["orders"]
    table = Table(
        "machines and model", "plan", "step", "nodes as listed", f"{orders} random orders: median", "least", "most",
        title="predicted step of the plan, and with its degrees placed without knowledge of devices and links",
    )  # fmt: skip
    for row in record["rows"]:
        planned = row["planned_s"]
        others = [row.get("listed_s"), *row.get("shuffled_s", (None, None, None))]
        told = ["does not fit" if each is None else f"{100 * (each / planned - 1):+.1f} %" for each in others]
        table.add_row(row["case"], row["plan"], format_seconds(planned), *told)
    console.print(table)


def _times(record: dict[str, Any]) -> Table:
    inside = record["error_in_sample_pct"]["by_problem"]
    simple = record["baseline"]["error_pct"]["by_problem"]
    table = Table(
        "problem", "runs", "mean", "largest", "bias", "in sample", "bubble only",
        title="step time: error in % on runs that the constants were not fitted on",
    )  # fmt: skip
    for problem, each in record["errors"].items():
        table.add_row(
            problem, str(each["runs"]), f"{each['mean']:.1f}", f"{each['largest']:.1f}", f"{each['bias']:+.1f}",
            f"{inside[problem]:.1f}" if problem in inside else "", f"{simple[problem]:.1f}",
        )  # fmt: skip
    return table


def _memory(record: dict[str, Any]) -> Table:
    table = Table("problem", "runs", "mean", "largest", "bias", "below", title="peak memory: error in %")
    for problem, each in record["memory_errors"].items():
        numbers = [f"{each[key]:.1f}" for key in ("mean", "largest")]
        table.add_row(problem, str(each["runs"]), *numbers, f"{each['bias']:+.1f}", f"{each['below']:.0f} % of runs")
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


def _searches(record: dict[str, Any]) -> Table:
    table = Table(
        "machines and model", "step, s", "gap at most, %", "search, s", "a node lost: again, s", "blocks sent",
        "with compression auto, s", "blocks sent", title="searches, in processor time",
    )  # fmt: skip
    for name, each in record["searches"].items():
        lost = [text for key in ("lost", "lost_auto") for text in _loss(each.get(key))]
        table.add_row(name, f"{each['step_s']:.3g}", f"{each['gap_pct']:.1f}", f"{each['search_s']:.2f}", *lost)
    return table


def _loss(found: dict[str, Any] | None) -> tuple[str, str]:
    """Time and state of a new plan; blank where there is one node."""
    if found is None:
        return "", ""
    return f"{found['replan_s']:.2f}", f"{found['sent_blocks']} of {found['held_blocks']}"


def _sentences(record: dict[str, Any]) -> list[str]:
    said = []
    if record["left_out"]:
        first = next(iter(record["left_out"].items()))
        said.append(f"{len(record['left_out'])} runs left out; the first, {first[0]}: {first[1]}")
    if record["failed_runs"]:
        said.append(f"{record['failed_runs']} runs failed when they were measured and have no time")
    if "search_time_s" in record:
        said += [f"search {name}: {reason}" for name, reason in record["search_unfinished"].items()]
        said.append(f"against every plan of a small problem: {record['gap_pct']:.2f} % slower than the best")
    machine, versions = record["machine"], record["versions"]
    said.append(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']} when it ended; "
        f"Python {versions['python']}"
    )
    return said
