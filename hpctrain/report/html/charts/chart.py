"""Figures as plain data, whatever library draws them, and what each of them says in words for people who cannot see it.

Series have a position in the palette, not a colour: the page has a palette for light and one for dark screens. Both are
that of Okabe and Ito (2008), which people with any kind of colour blindness can tell apart.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from hpctrain.base.units import format_si
from hpctrain.report.html.charts.reduce import extremes

COLOURS = 8
"""Colours of the palette."""
MOST_POINTS = 1500
"""Most points of a curve. Of more, the first, the last, and the smallest and the largest of each of 749 equal stretches
are shown."""
Form = Literal["line", "faint", "dashed", "points"]
"""How a curve is drawn. faint: behind the others, without a place in the legend. points: a mark for each value."""
MarkKind = Literal["fault", "recovery"]
DIGITS = 5
"""Significant digits of shown values."""


@dataclass(frozen=True)
class Axis:
    """An axis of a figure."""

    title: str
    unit: str = ""
    """Unit such as s or B/s, which is shown with an SI prefix; '%': shares, which are shown in percent; '': plain
    numbers."""
    from_zero: bool = False
    is_log: bool = False


@dataclass(frozen=True)
class Curve:
    """A line of a figure."""

    name: str
    x: tuple[Sequence[float], ...]
    """For each of the chart's horizontal axes, the coordinates of all points."""
    y: Sequence[float | None]
    """Vertical coordinates; None, infinite or NaN (a diverged loss) is a gap."""
    colour: int = 0
    """Position in the palette; after the last colour the first one is used again. A faint curve whose position is
    beyond the palette is grey."""
    form: Form = "line"
    low: Sequence[float] | None = None
    """Lower edge of a band around the line."""
    high: Sequence[float] | None = None
    """Upper edge of the band."""

    @cached_property
    def shown(self) -> list[int]:
        """Positions of the points that are shown."""
        return extremes(self.y, MOST_POINTS)


@dataclass(frozen=True)
class Mark:
    """A vertical line in a figure."""

    x: tuple[float, ...]
    """Coordinate of the line on each of the chart's horizontal axes."""
    kind: MarkKind


@dataclass(frozen=True)
class Chart(ABC):
    """A figure with its title and a note of one sentence or two."""

    id: str
    """Name of the figure on its page; part of the ids of its HTML elements."""
    title: str
    note: str
    height: int = field(default=320, kw_only=True)
    """Height in pixels."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return what the page's script draws."""

    @property
    @abstractmethod
    def words(self) -> str:
        """What the figure shows, in words."""

    @property
    def note_of_points(self) -> str:
        """How many points are shown, if not all are; else ''."""
        return ""


@dataclass(frozen=True)
class LineChart(Chart):
    """Curves over one or several horizontal axes, of which the reader chooses one."""

    x: tuple[Axis, ...]
    y: Axis
    curves: list[Curve]
    marks: list[Mark] = field(default_factory=list)

    @property
    def note_of_points(self) -> str:
        """How many points are shown, if not all are; else ''."""
        lengths = [(len(curve.y), len(curve.shown)) for curve in self.curves]
        points, shown = map(max, zip(*lengths, strict=True))
        if shown == points:
            return ""
        return f" {shown:,} of {points:,} points shown: the smallest and the largest of equal stretches."

    @property
    def words(self) -> str:
        """Each curve's first, last, smallest and largest value."""
        return "; ".join([f"{self.title}, over {self.x[0].title}", *map(self._curve_words, self.curves)])

    def _curve_words(self, curve: Curve) -> str:
        known = [value for value in curve.y if value is not None and math.isfinite(value)]
        if not known:
            return f"{curve.name}: no value"
        first, last, low, high = (_text(value, self.y.unit) for value in (known[0], known[-1], min(known), max(known)))
        return f"{curve.name}: {len(known)} values from {first} to {last}, smallest {low}, largest {high}"

    def to_json(self) -> dict[str, Any]:
        """Return axes, curves and marks; numbers are rounded."""
        return {
            "kind": "lines",
            "x": [_axis_json(axis) for axis in self.x],
            "y": _axis_json(self.y),
            "curves": [_curve_json(curve) for curve in self.curves],
            "marks": [{"x": list(map(_rounded_x, mark.x)), "kind": mark.kind} for mark in self.marks],
        }


@dataclass(frozen=True)
class HeatMap(Chart):
    """A matrix of values as colours."""

    x_title: str
    y_title: str
    columns: list[str]
    rows: list[str]
    cells: list[list[float | None]]
    """Values by row and column, in `unit`; None where there is none."""
    unit: str
    with_numbers: bool = False
    """Write each cell's value into it."""

    @property
    def words(self) -> str:
        """Size of the matrix, and its smallest and largest cell."""
        known = [
            (value, row, column)
            for row, line in zip(self.rows, self.cells, strict=True)
            for column, value in zip(self.columns, line, strict=True)
            if value is not None
        ]
        size = f"{self.title}: {len(self.rows)} rows ({self.y_title}), {len(self.columns)} columns ({self.x_title})"
        ends = [
            f"{word} {_text(value, '%') if self.unit == '%' else f'{value:.4g} {self.unit}'} at {row}, {column}"
            for word, (value, row, column) in (("smallest", min(known)), ("largest", max(known)))
        ]
        return "; ".join([size, *ends])

    def to_json(self) -> dict[str, Any]:
        """Return names and cells; values are rounded, so that the page does not become three times as large."""
        cells = [[None if value is None else _significant(value, 4) for value in row] for row in self.cells]
        return {
            "kind": "heat", "x": {"title": self.x_title}, "y": {"title": self.y_title}, "columns": self.columns,
            "rows": self.rows, "cells": cells, "unit": self.unit, "numbers": self.with_numbers,
        }  # fmt: skip


@dataclass(frozen=True)
class SpanChart(Chart):
    """Bars over time in rows: what each rank does."""

    rows: list[str]
    kinds: list[str]
    """Names of the kinds of bars, in the order of their colours."""
    bars: list[tuple[int, int, float, float, str]]
    """(row, kind, start in seconds, end in seconds, name) of each bar; row and kind are positions in `rows` and
    `kinds`."""

    @property
    def words(self) -> str:
        """The time of each kind, in all rows together."""
        totals = [0.0] * len(self.kinds)
        for _, kind, start, end, _ in self.bars:
            totals[kind] += end - start
        parts = [f"{name} {_text(total, 's')}" for name, total in zip(self.kinds, totals, strict=True) if total]
        return f"{self.title}: {len(self.rows)} rows; all together: {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """Return rows, kinds and bars; times are rounded to a microsecond."""
        bars = [[row, kind, round(start, 6), round(end, 6), name] for row, kind, start, end, name in self.bars]
        return {"kind": "spans", "rows": self.rows, "kinds": self.kinds, "bars": bars}


def _axis_json(axis: Axis) -> dict[str, Any]:
    return {"title": axis.title, "unit": axis.unit, "zero": axis.from_zero, "log": axis.is_log}


def _curve_json(curve: Curve) -> dict[str, Any]:
    shown = curve.shown
    values: dict[str, Any] = {
        "name": curve.name,
        "colour": curve.colour,
        "form": curve.form,
        "x": [[_rounded_x(places[index]) for index in shown] for places in curve.x],
        "y": list(_rounded([curve.y[index] for index in shown])),
    }
    if curve.low is not None and curve.high is not None:
        values["low"] = list(_rounded([curve.low[index] for index in shown]))
        values["high"] = list(_rounded([curve.high[index] for index in shown]))
    return values


def _rounded(values: Sequence[float | None]) -> Iterator[float | None]:
    for value in values:
        yield None if value is None or not math.isfinite(value) else _significant(value, DIGITS)


def _rounded_x(value: float) -> float:
    return value if isinstance(value, int) else round(value, 3)


def _significant(value: float, digits: int) -> float:
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def _text(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1%}"
    return format_si(value, unit) if unit else f"{value:.4g}"
