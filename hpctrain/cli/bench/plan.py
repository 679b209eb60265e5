"""Tables of the record of `hpctrain bench plan`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from hpctrain.base.units import format_seconds
from hpctrain.cli.views.console import Console


def show(record: dict[str, Any], console: Console) -> None:
    """Print the searches, and the gap of the planner's plan to the best plan of a small problem."""
    if record["searches"]:
        console.print(_searches(record))
    sentences = [f"search {name}: {reason}" for name, reason in record["search_unfinished"].items()]
    sentences.append(f"against every plan of a small problem: {record['gap_pct']:.2f} % slower than the best")
    machine, versions = record["machine"], record["versions"]
    sentences.append(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']} when it ended; "
        f"Python {versions['python']}"
    )
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
