"""What `hpctrain watch` draws of a sweep: a line for each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from rich.text import Text

from hpctrain.base.units import format_seconds
from hpctrain.report.binned_curve import sparkline
from hpctrain.report.live_run import LiveRun
from hpctrain.report.status import AT_WORK, RunStatus, State
from hpctrain.report.watch.run_view import COLOURS
from hpctrain.report.watch.text_fit import Screen, fit, line

_STATES = get_args(State)
NAME = 24
"""Most columns of a run's name."""
FIGURES = 48
"""Columns of the figures between a run's name and its curve."""


def sweep_view(name: str, runs: Sequence[tuple[LiveRun, RunStatus]], screen: Screen) -> list[Text]:
    """Return the view of a sweep: its runs by state, and a line for each run with its newest figures and the curve of
    its loss. Where the terminal has too few lines, runs that are at work come before those that wait or have ended.

    Args:
        name: the sweep's name.
        runs: the runs and their statuses, in the order of the sweep's tasks.
    """
    states = Counter(status.state for _, status in runs)
    counts = "  ".join(f"{states[state]} {state}" for state in _STATES if states[state])
    lines = [line(0, (f"{name}  ", "bold"), counts)]
    names = [status.name for _, status in runs]
    width = min(NAME, max(map(len, names), default=0))
    for task, (live, status) in enumerate(runs):
        loss = "" if status.loss is None else f"{status.loss:.4f}"
        eta = "" if status.eta_s is None else f"{format_seconds(status.eta_s)} left"
        figures = f"{status.step:>8}/{status.steps:<8} {loss:>9}  {eta:<16}"
        blocks = sparkline(live.loss.columns(screen.width - width - 12 - FIGURES))
        lines.append(
            line(
                1 + task + (0 if status.state in AT_WORK else len(runs)),
                f"{_end(names[task], width):<{width}} ",
                (f"{status.state:<11}", COLOURS.get(status.state, "cyan")),
                f"{figures:<{FIGURES}}",
                (blocks, "cyan"),
            )
        )
    return fit(lines, screen)


def _end(name: str, width: int) -> str:
    """Return the end of a name, which says which task of the sweep it is."""
    return name if len(name) <= width else f"…{name[-(width - 1) :]}"
