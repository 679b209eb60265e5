"""Show a run on the terminal: one progress line, rewritten in place, and one line for each event."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO

from hpctrain.base.clock import utc_text
from hpctrain.base.control_characters import control
from hpctrain.base.units import format_count, format_seconds
from hpctrain.records.history.event import Event
from hpctrain.records.history.metric import MetricRow
from hpctrain.report.event_text import describe_event
from hpctrain.report.status import RunStatus
from hpctrain.report.validation import loss_words, losses_by_set

_RECENT = 20
_REWRITE = "\r\x1b[2K"


@dataclass(frozen=True)
class TerminalLine:
    """A line of the view; if it is transient, the next line may replace it."""

    text: str
    transient: bool


def progress_line(row: MetricRow, steps: int, step_time_s: float | None = None) -> str:
    """Return a step as one line.

    Args:
        steps: number of steps of the whole run.
        step_time_s: present step time in seconds, for the remaining time; None: that of this step.
    """
    width = len(str(steps))
    remaining_s = (steps - row.step) * (step_time_s if step_time_s is not None else row.step_time_s)
    parts = [
        f"step {row.step:>{width}}/{steps}",
        f"loss {row.loss:.4f}",
        f"{format_count(row.tokens_per_s)} tokens/s",
        f"{format_seconds(remaining_s)} left" if row.step < steps else "last step",
        f"generation {row.generation}",
    ]
    parts[2:2] = loss_words(losses_by_set(row))
    return "  ".join(parts)


def live_lines(items: Iterable[MetricRow | Event], steps: int, every_s: float = 0.0) -> Iterator[TerminalLine]:
    """Yield lines for metrics and events, as `follow` yields them.

    Args:
        every_s: fewest seconds of the run between two progress lines; the last step and validations always appear.
    """
    recent: deque[float] = deque(maxlen=_RECENT)
    shown = float("-inf")
    for item in items:
        if isinstance(item, Event):
            yield TerminalLine(describe_event(item), transient=False)
            continue
        recent.append(item.step_time_s)
        important = item.step >= steps or bool(losses_by_set(item))
        if important or item.time_s - shown >= every_s:
            shown = item.time_s
            yield TerminalLine(progress_line(item, steps, sum(recent) / len(recent)), transient=not important)


def show(lines: Iterable[TerminalLine], out: TextIO, in_place: bool) -> None:
    """Write the lines to `out`. With `in_place`, for a terminal, each line overwrites a transient line before it."""
    transient = False
    for line in lines:
        if transient:
            control(out, _REWRITE)
        transient = in_place and line.transient
        out.write(line.text + ("" if transient else "\n"))
        out.flush()
    if transient:
        out.write("\n")
        out.flush()


def status_lines(status: RunStatus, now: float) -> list[str]:
    """Return a status as lines for a person.

    Args:
        now: wall clock, seconds since 1970.
    """
    lines = [f"{status.name}: {status.state} - {status.reason}", *queue_lines(status, now)]
    lines += [f"  {words}" for words in status.further_words]
    if status.warning is not None:
        lines.append(f"  warning: {status.warning}")
    progress = [f"step {status.step}/{status.steps}", *figures(status)]
    if status.eta_s is not None:
        progress.append(f"{format_seconds(status.eta_s)} left")
    lines.append("  " + "  ".join(progress))
    place = f"  attempt {status.attempt}  generation {status.generation}"
    if status.nodes:
        place += f"  nodes {', '.join(status.nodes)}"
    lines.append(place)
    if status.source_samples is not None:
        lines.append("  samples  " + "  ".join(f"{name} {count:,}" for name, count in status.source_samples.items()))
    if status.weights_sha256 is not None:
        lines.append(f"  weights sha256 {status.weights_sha256}")
    if status.recoveries or status.lost_steps:
        lines.append(f"  recoveries {status.recoveries}  steps done twice {status.lost_steps}")
    return lines


def figures(status: RunStatus) -> list[str]:
    """Return the known ones of loss, validation losses and speed, as texts."""
    loss = [] if status.loss is None else [f"loss {status.loss:.4f}"]
    speed = [] if status.tokens_per_s is None else [f"{format_count(status.tokens_per_s)} tokens/s"]
    return [*loss, *loss_words(status.valid_losses), *speed]


def queue_lines(status: RunStatus, now: float) -> list[str]:
    """Return a line that says when a queued run may start, or that it needs action; [] if neither is known."""
    if status.needs_action:
        return ["  it stays in the queue until somebody does that"]
    if status.expected_start_s is None or "BeginTime" in status.reason:
        return []  # the run pauses, and the reason says for how long
    wait = format_seconds(max(0.0, status.expected_start_s - now))
    return [f"  Slurm expects to start it in {wait} ({utc_text(status.expected_start_s)})"]
