"""A run on the terminal: progress lines and events of `train`, and the lines of `status`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

from hpctrain.base.clock import utc_text
from hpctrain.base.output_streams import control
from hpctrain.base.units import format_age, format_count, format_seconds, format_si
from hpctrain.records.history.run_log import Event, MetricRow
from hpctrain.report.event_text import describe_event
from hpctrain.report.status import RunStatus
from hpctrain.report.summaries import loss_words, losses_by_set

_RECENT = 20
_REWRITE = "\r\x1b[2K"


@dataclass(frozen=True)
class TerminalLine:
    """A line about a run. On a terminal, the next line overwrites a transient one."""

    text: str
    transient: bool


def progress_line(row: MetricRow, steps: int, step_time_s: float | None = None) -> str:
    """Return a training step as one line: step, loss, validation losses if it has any, speed, time left, generation.

    Args:
        steps: number of steps of the whole run.
        step_time_s: present step time in seconds, from which the time left follows; None: that of this step.
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
    """Yield lines for a terminal about a run's metrics and events.

    Args:
        items: the metrics and events, as `follow` yields them.
        steps: number of steps of the whole run.
        every_s: fewest seconds between two progress lines, by the times of the metrics; the last step and validations
            always appear.
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
    """Write the lines to `out`.

    Args:
        in_place: whether `out` is a terminal, on which a line overwrites a transient line before it.
    """
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
    cost = cost_text(status.node_hours, status.gpu_hours)
    age = "" if status.last_sign_s is None else f"newest line in its files {format_age(status.last_sign_s)} old"
    if cost or age:
        lines.append("  " + "  ".join(filter(None, [f"cost {cost}" if cost else "", age])))
    if status.energy is not None:
        lines.append(f"  {energy_text(status.energy)}")
    if status.source_samples is not None:
        lines.append("  samples  " + "  ".join(f"{name} {count:,}" for name, count in status.source_samples.items()))
    if status.weights_sha256 is not None:
        lines.append(f"  weights sha256 {status.weights_sha256}")
    if status.slow_rank is not None:
        lines.append(f"  {status.slow_rank}")
    if status.recoveries or status.lost_steps:
        lines.append(f"  recoveries {status.recoveries}  steps done twice {status.lost_steps}")
    return lines


def figures(status: RunStatus) -> list[str]:
    """Return loss, validation losses, tokens per second and MFU as texts, as far as they are known."""
    loss = [] if status.loss is None else [f"loss {status.loss:.4f}"]
    speed = [] if status.tokens_per_s is None else [f"{format_count(status.tokens_per_s)} tokens/s"]
    share = [] if status.mfu is None else [f"MFU {status.mfu:.1%}"]
    return [*loss, *loss_words(status.valid_losses), *speed, *share]


def cost_text(node_hours: float | None, gpu_hours: float | None) -> str:
    """Return what a run has cost so far as text: '1.5 GPU-h', or '0.2 node-h' if the GPU-hours are not known; '' if
    nothing is known, or nothing was used."""
    if gpu_hours:
        return f"{gpu_hours:.3g} GPU-h"
    return f"{node_hours:.3g} node-h" if node_hours else ""


def energy_text(energy: Mapping[str, float]) -> str:
    """Return what energy a run has used as text, as far as it is known.

    Args:
        energy: as in `RunStatus.energy`.
    """
    parts = [f"energy {energy['total_j'] / 3.6e6:.3g} kWh"]
    parts += [f"{format_si(energy[key], 'J')}/{what}" for key, what in _ENERGY.items() if key in energy]
    parts += [f"{energy['carbon_g'] / 1e3:.3g} kg CO2e"] if "carbon_g" in energy else []
    return "  ".join(parts)


_ENERGY = {"step_j": "step", "token_j": "token"}


def queue_lines(status: RunStatus, now: float) -> list[str]:
    """Return a line that says when Slurm may start a queued run, or that somebody has to act first; [] if neither is
    known, or if the run pauses until a set time, which its reason says.

    Args:
        now: wall clock, seconds since 1970.
    """
    if status.needs_action:
        return ["  it stays in the queue until somebody does that"]
    if status.expected_start_s is None or "BeginTime" in status.reason:
        return []  # the run pauses, and the reason says for how long
    wait = format_seconds(max(0.0, status.expected_start_s - now))
    return [f"  Slurm expects to start it in {wait} ({utc_text(status.expected_start_s)})"]
