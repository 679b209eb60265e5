"""The actions of a step over time: as bars for a chart, or as lines of letters for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "S": "sum over replicas",
    "U": "norm and optimizer",
}
"""Meaning of each letter of a timeline, in the order of the colours."""
WAITS = "·"
STYLES = {"F": "blue", "B": "dark_orange", "I": "green", "W": "yellow", "S": "magenta", "U": "cyan", WAITS: "dim"}


@dataclass(frozen=True)
class Bar:
    """One action in a row of a timeline. Its times are seconds from the start of the step."""

    row: int
    """Pipeline rank of the action."""
    kind: str
    """Kind of the action, a key of `KINDS`."""
    label: str
    """Text that names the action, such as '2F0'."""
    start_s: float
    end_s: float


def letters(bars: Sequence[Bar], rows: int, total_s: float, width: int) -> list[str]:
    """Return a timeline as one line of `width` letters for each row.

    A letter is the kind of action that takes most of the column's time, or `WAITS` if idle time is longer.

    Args:
        rows: number of rows, one for each pipeline rank.
        total_s: time that the whole width stands for, in seconds.
    """
    if total_s <= 0:
        return [WAITS * width] * rows
    column_s = total_s / width
    shares: list[list[dict[str, float]]] = [[{} for _ in range(width)] for _ in range(rows)]
    for bar in bars:
        first = min(width - 1, int(bar.start_s / column_s))
        last = min(width - 1, int(bar.end_s / column_s))
        for column in range(first, last + 1):
            inside = min(bar.end_s, (column + 1) * column_s) - max(bar.start_s, column * column_s)
            cell = shares[bar.row][column]
            cell[bar.kind] = cell.get(bar.kind, 0.0) + max(0.0, inside)
    return ["".join(_letter(cell, column_s) for cell in row) for row in shares]


def _letter(cell: dict[str, float], column_s: float) -> str:
    idle = column_s - sum(cell.values())
    kind = max(cell, key=lambda letter: cell[letter], default=WAITS)
    return WAITS if not cell or idle > cell[kind] else kind


def terminal_lines(bars: Sequence[Bar], rows: int, total_s: float, width: int) -> list[Text]:
    """Return a timeline in colour: a line for each pipeline rank, which begins with the number of the rank, and below
    them a line that explains the letters.

    Args:
        rows: number of pipeline ranks.
        total_s: time that the whole width stands for, in seconds.
        width: columns of the terminal.
    """
    head = len(str(rows - 1)) + 1
    lines = []
    for number, line in enumerate(letters(bars, rows, total_s, max(10, width - head))):
        text = Text(f"{number:>{head - 1}} ")
        for letter in line:
            text.append(letter, style=STYLES[letter])
        lines.append(text)
    kinds = [kind for kind in KINDS if any(bar.kind == kind for bar in bars)]
    lines.append(Text(", ".join([*(f"{kind} {KINDS[kind]}" for kind in kinds), f"{WAITS} waits"])))
    return lines
