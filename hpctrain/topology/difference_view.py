"""Formats differences between two topologies for the terminal: a table for each group, and one line of summary.
Pure."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.base.units import format_bytes, format_seconds, format_si
from hpctrain.topology.compare import GROUPS, Difference, Value
from hpctrain.topology.matrix_view import ABSENT

ROWS_PER_GROUP_MAX = 20
"""Most rows that a group lists; further ones are counted. People read the largest changes, programs use --json."""
_TITLES = {"nodes": "Nodes", "health": "Health", "drivers": "Drivers", "devices": "Devices", "links": "Links"}


def render_differences(differences: list[Difference], tolerance: float) -> RenderableType:
    """Return a table for each group with its largest changes first, then the summary."""
    if not differences:
        return Text(f"nothing differs; figures may, by up to {tolerance:.0%}")
    parts: list[RenderableType] = []
    for group in GROUPS:
        rows = sorted((entry for entry in differences if entry.group == group), key=_size, reverse=True)
        if rows:
            parts.append(_table(_TITLES[group], rows[:ROWS_PER_GROUP_MAX]))
        if len(rows) > ROWS_PER_GROUP_MAX:
            parts.append(Text(f"and {len(rows) - ROWS_PER_GROUP_MAX} smaller changes; --json has all", style="dim"))
    return Group(*parts, Text(summary(differences)))


def summary(differences: list[Difference]) -> str:
    """Return one line of counts: '1 node went, 1 came; 3 figures of links worse, 1 better'."""
    went = sum(entry.group == "nodes" and entry.after is None for entry in differences)
    came = sum(entry.group == "nodes" and entry.before is None for entry in differences)
    parts = [f"{went} node(s) went" if went else "", f"{came} node(s) came" if came else ""]
    for group in GROUPS[1:]:
        directions = Counter(_direction(entry) for entry in differences if entry.group == group)
        if directions:
            counts = [f"{directions[word]} {word}" for word in ("worse", "better", "other") if directions[word]]
            culprit = _common_node([entry for entry in differences if entry.group == group and entry.better is False])
            parts.append(f"{_TITLES[group].lower()}: {', '.join(counts)}{culprit if group == 'links' else ''}")
    return "; ".join(filter(None, parts))


def _common_node(worse: list[Difference]) -> str:
    """Return a hint where most of the worse links share one node: then the node has changed, not the network."""
    ends = Counter(node for entry in worse for node in entry.nodes)
    for node, count in ends.most_common(1):
        if count > 2 and count > 2 / 3 * len(worse):
            return f" ({count} of the worse at {node})"
    return ""


def _direction(entry: Difference) -> str:
    return "other" if entry.better is None else "better" if entry.better else "worse"


def _size(entry: Difference) -> float:
    """Return the factor by which a value grew or shrank; infinity without a ratio, so that it is listed first."""
    ratio = entry.ratio
    return float("inf") if not ratio else max(ratio, 1 / ratio)


def _table(title: str, rows: list[Difference]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("what", overflow="fold")
    for heading in ("before", "after", "ratio"):
        table.add_column(heading, justify="right", overflow="fold")
    for entry in rows:
        ratio = entry.ratio
        change = ABSENT if ratio is None else f"{'↑' if ratio > 1 else '↓'} {ratio:.2f}"
        style = {"better": "green", "worse": "red", "other": ""}[_direction(entry)]
        table.add_row(
            entry.what, _value(entry.before, entry.unit), _value(entry.after, entry.unit), Text(change, style=style)
        )
    return table


def _value(value: Value, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or ABSENT
    if unit == "s":
        return format_seconds(value)
    return format_bytes(value) if unit == "B" else format_si(value, unit)
