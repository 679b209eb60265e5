"""Fits styled lines into a terminal: as many lines as it has, none wider than it is, in characters that it can draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from hpctrain.base.output_streams import printable

LABEL = 9
"""Columns of the word before a figure, with the space behind it."""
_ASCII = str.maketrans("▁▂▃▄▅▆▇█░…×·–°", "_.,-=+*#.~x.- ")
"""Character of a view -> what stands for it where the terminal has ASCII only."""


@dataclass(frozen=True)
class Screen:
    """What a view is drawn on."""

    width: int
    """Columns."""
    height: int
    """Lines."""
    ascii_only: bool = False
    """Whether the terminal's characters are not those of UTF-8."""


@dataclass(frozen=True)
class RankedLine:
    """A line of a view, and how much it matters."""

    rank: int
    """Lines with high numbers are left out first where the terminal has too few lines."""
    parts: tuple[tuple[str, str], ...]
    """(text, rich's style or "") of each part, from left to right."""


def line(rank: int, *parts: str | tuple[str, str]) -> RankedLine:
    """Return a line of a view.

    Args:
        rank: as in `RankedLine`.
        parts: the line's texts from left to right, each alone or as (text, rich's style). `fit` replaces characters
            that the terminal cannot draw.
    """
    return RankedLine(rank, tuple((part, "") if isinstance(part, str) else part for part in parts))


def label(word: str) -> tuple[str, str]:
    """Return the word before a figure, filled up to `LABEL` columns, in its style."""
    return f"{word:<{LABEL - 1}} ", "bold"


def fit(lines: Iterable[RankedLine], screen: Screen) -> list[Text]:
    """Return the lines in order, each cut to the width. If they are more than the screen has, those with the highest
    ranks are left out."""
    ordered = list(lines)
    places = sorted(range(len(ordered)), key=lambda place: ordered[place].rank)[: max(0, screen.height)]
    return [_styled(ordered[place].parts, screen) for place in sorted(places)]


def _styled(parts: Sequence[tuple[str, str]], screen: Screen) -> Text:
    styled = Text(no_wrap=True, overflow="crop")
    room = screen.width
    for part, style in parts:
        text = _drawable(part, screen.ascii_only)
        if cell_len(text) > room:
            cut = set_cell_size(text, room - 1).rstrip() + _drawable("…", screen.ascii_only) if room > 0 else ""
            styled.append(cut, style)
            break
        styled.append(text, style)
        room -= cell_len(text)
    return styled


def _drawable(text: str, ascii_only: bool) -> str:
    """Return a text of any origin as one line of characters that the terminal can draw."""
    one_line = printable(text).replace("\n", " ").replace("\t", " ")
    return one_line.translate(_ASCII).encode("ascii", "replace").decode() if ascii_only else one_line
