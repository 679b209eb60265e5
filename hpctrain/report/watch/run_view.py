"""What `hpctrain watch` draws of one run. A figure that was not measured has no line, and never stands as 0."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from rich.text import Text

from hpctrain.base.units import format_bytes, format_count, format_seconds, format_si
from hpctrain.records.history.run_log import Event
from hpctrain.report.binned_curve import BinnedCurve, sparkline
from hpctrain.report.event_text import describe_event
from hpctrain.report.live_run import LiveRun
from hpctrain.report.status import RunStatus
from hpctrain.report.summaries import loss_words, restore_point, steady_step_time
from hpctrain.report.terminal import queue_lines
from hpctrain.report.watch.rank_view import rank_lines
from hpctrain.report.watch.text_fit import LABEL, RankedLine, Screen, fit, label, line
from hpctrain.slurm.job import JobInfo

PACE_ROWS = 50
"""Newest steps whose median is the present step time."""
COLOURS = {
    "done": "green", "running": "green", "failed": "red", "cancelled": "red", "recovering": "yellow",
}  # fmt: skip
"""State of a run -> colour of its name in a view; others are cyan."""
LAYERS_MOST = 24
"""Most layers whose densities are drawn; the words after the drawing are about all layers."""
LAST_EVENTS = 10
"""Rank of the newest event's line in a view (`RankedLine.rank`); the rank of each older event is higher by 2."""


@dataclass(frozen=True)
class WatchedFigures:
    """What a view of a run is drawn from."""

    live: LiveRun
    """The run's files, as last read."""
    status: RunStatus
    job: JobInfo | None
    """What Slurm says of the run's job; None if it was not asked, or knows no such job."""
    job_id: str | None
    """The run's newest job; None for a local run."""
    now: float
    """Wall clock, seconds since 1970."""


def run_view(figures: WatchedFigures, screen: Screen) -> list[Text]:
    """Return the view of a run: at most as many lines as the terminal has, none wider than it is."""
    lines = [
        *_head(figures.status, figures.now, screen),
        _progress(figures.status, screen),
        *_time_limit(figures),
        *_curves(figures, screen),
        *_at_risk(figures),
        *_place(figures),
        *rank_lines(figures.live.ranks, figures.live.rows, screen),
        *_sent(figures),
        *_machines(figures),
    ]
    room = max(0, screen.height - len(lines))
    return fit([*lines, *_events(figures.live.events, room + LAST_EVENTS)], screen)


def _head(status: RunStatus, now: float, screen: Screen) -> Iterator[RankedLine]:
    colour = COLOURS.get(status.state, "cyan")
    begin = f"{status.name}  {status.state}  "
    first, *rest = textwrap.wrap(status.reason, max(20, screen.width - len(begin)), max_lines=4) or [""]
    if status.state == "running":
        rest = []
    yield line(0, (f"{status.name}  ", "bold"), (f"{status.state}  ", f"bold {colour}"), first)
    for text in rest:
        yield line(2, " " * min(len(begin), screen.width // 2), text)
    for text in [*status.further_words, *(words.strip() for words in queue_lines(status, now))]:
        yield line(4, f"  {text}")
    if status.warning is not None:
        yield line(5, ("  warning: ", "yellow"), status.warning)


def _progress(status: RunStatus, screen: Screen) -> RankedLine:
    share = min(1.0, status.step / status.steps)
    percent = int(100 * share)  # 100 only at the end
    eta = f"  {format_seconds(status.eta_s)} left" if status.eta_s is not None else ""
    words = f"  {percent} %  step {status.step}/{status.steps}{eta}"
    width = max(0, min(screen.width - len(words), screen.width // 2))
    done = int(share * width)
    return line(1, ("█" * done, "green"), ("░" * (width - done), "dim"), words if width else words.strip())


def _time_limit(figures: WatchedFigures) -> Iterator[RankedLine]:
    """Yield a line with the time to the job's time limit, and whether the last step comes before it."""
    job, eta_s = figures.job, figures.status.eta_s
    if job is None or job.end_s is None or job.is_waiting or job.is_ended:
        return
    remaining_s = max(0.0, job.end_s - figures.now)
    words = f"{format_seconds(remaining_s)} to the job's time limit"
    if eta_s is None:
        yield line(12, label("limit"), words)
    elif eta_s <= remaining_s:
        yield line(12, label("limit"), f"{words}, {format_seconds(remaining_s - eta_s)} after the last step")
    else:
        late = f", {format_seconds(eta_s - remaining_s)} before the last step"
        yield line(3, label("limit"), words, (late, "yellow"))


def _curves(figures: WatchedFigures, screen: Screen) -> Iterator[RankedLine]:
    status, drawn = figures.status, list[tuple[int, str, str, BinnedCurve]]()
    if status.loss is not None:
        words = "  ".join([f"{status.loss:.4f}", *loss_words(status.valid_losses)])
        drawn.append((6, "loss", words, figures.live.loss))
    if status.tokens_per_s is not None:
        pace = steady_step_time(list(figures.live.rows)[-PACE_ROWS:])
        parts = [f"{format_count(status.tokens_per_s)} tokens/s"]
        parts += [] if pace is None else [f"{format_seconds(pace)} a step"]
        parts += [] if status.mfu is None else [f"MFU {status.mfu:.1%}"]
        drawn.append((7, "speed", "  ".join(parts), figures.live.tokens_per_s))
    # The curves begin below each other, in the middle of the screen if the words leave room.
    begin = max([screen.width // 2, *(LABEL + len(words) + 2 for _, _, words, _ in drawn)])
    for rank, word, words, curve in drawn:
        blocks = sparkline(curve.columns(screen.width - begin))
        yield line(rank, label(word), f"{words:<{begin - LABEL}}" if blocks else words, (blocks, "cyan"))


def _at_risk(figures: WatchedFigures) -> Iterator[RankedLine]:
    """Yield a line with the steps that would be made again if the whole job ended now."""
    live, status = figures.live, figures.status
    if status.state not in ("running", "recovering") or not live.rows:
        return
    saved = restore_point(live.events)
    steps = max(0, live.rows[-1].step - saved)
    pace = steady_step_time(list(live.rows)[-PACE_ROWS:])
    seconds = f" ({format_seconds(steps * pace)})" if pace is not None and steps else ""
    where = f" since checkpoint {saved}" if saved else ", without a checkpoint yet"
    memory = live.run.recovery.memory != "off"
    fewer = "; state in memory may save them" if memory and steps else ""
    yield line(8, label("at risk"), f"{steps} step{'' if steps == 1 else 's'}{seconds}{where}{fewer}")


def _place(figures: WatchedFigures) -> Iterator[RankedLine]:
    status = figures.status
    job = [] if figures.job_id is None else [f"job {figures.job_id}"]
    if status.job_state is not None:
        job.append(status.job_state)
    again = [f"recoveries {status.recoveries}  steps done twice {status.lost_steps}"] if status.lost_steps else []
    parts = [" ".join(job), f"attempt {status.attempt}", f"generation {status.generation}", *again]
    yield line(9, label("run"), "  ".join(filter(None, parts)))
    states = node_states(figures.live.events)
    if states:
        names = {state: [node for node in states if states[node] == state] for state in dict.fromkeys(states.values())}
        fewest = sorted(names, key=lambda state: len(names[state]))
        words = "; ".join(f"{len(names[state])} {state}: {', '.join(names[state])}" for state in fewest)
        yield line(14, label("nodes"), words)


def _sent(figures: WatchedFigures) -> Iterator[RankedLine]:
    row = figures.live.rows[-1] if figures.live.rows else None
    if row is None:
        return
    sent = sent_words(row.bytes_sent.model_dump(exclude_none=True))
    compression = row.compression
    density = compression.density if compression else None
    residual = compression.residual_norm_ratio if compression else None
    words = [f"{sent} a step"] if sent else []
    words += [] if density is None else [f"density {density:.3g}"]
    words += [] if residual is None else [f"residual {residual:.2f}"]
    if words:
        yield line(13, label("sent"), "  ".join(words))
    densities = [layer.gradient_density for layer in figures.live.layers if layer.gradient_density is not None]
    if densities:
        low, high = (f"{100 * share:.2g} %" for share in (min(densities), max(densities)))
        words = [f"  90 % of a layer's gradient is in {low} to {high} of its numbers"]
        yield line(20, label("layers"), (sparkline(densities[:LAYERS_MOST]), "cyan"), *words)


def sent_words(sent: Mapping[str, int]) -> str:
    """Return bytes by mesh axis as text, with the parts of an axis in brackets: 'dp 3.0 MiB (inter node 1.0 MiB)'.
    What has no bytes is left out.

    Args:
        sent: name of an axis, or of an axis and a part of it joined by '_' -> bytes.
    """
    words = []
    for axis in (name for name in sent if "_" not in name and sent[name]):
        parts = {name.partition("_")[2]: count for name, count in sent.items() if name.startswith(f"{axis}_") and count}
        inner = ", ".join(f"{part.replace('_', ' ')} {format_bytes(count)}" for part, count in parts.items())
        words.append(f"{axis} {format_bytes(sent[axis])}" + (f" ({inner})" if inner else ""))
    return ", ".join(words)


def _machines(figures: WatchedFigures) -> Iterator[RankedLine]:
    live = figures.live
    row = live.rows[-1] if live.rows else None
    if row is not None and row.memory_bytes_max is not None:
        most = max(live.ranks, key=lambda rank: rank.memory_bytes, default=None)
        where = f", rank {most.rank} on {most.device}" if most else ""
        yield line(15, label("memory"), f"{format_bytes(row.memory_bytes_max)} at most{where}")
    energy, pace = live.energy, steady_step_time(list(live.rows)[-PACE_ROWS:])
    words = []
    if energy.power_w is not None:
        words.append(format_si(energy.power_w, "W"))
        if pace is not None and row is not None and figures.status.state == "running":
            joules = energy.power_w * pace
            words += [f"{format_si(joules, 'J')}/step", f"{joules / row.tokens:.3g} J/token"]
    words += [] if energy.total_j is None else [f"{energy.total_j / 3.6e6:.3g} kWh so far"]
    words += [] if energy.carbon_g is None else [f"{energy.carbon_g / 1e3:.3g} kg CO2e"]
    if words:
        yield line(16, label("energy"), "  ".join(words))
    gpus = [gpu for node in energy.newest for gpu in node.gpus or []]
    uses = [gpu.use for gpu in gpus if gpu.use is not None]
    hottest = max((gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None), default=None)
    words = [f"{100 * sum(uses) / len(uses):.0f} % in use"] if uses else []
    words += [f"{hottest:.0f} °C at most"] if hottest is not None else []
    if words:
        yield line(18, label("GPUs"), "  ".join(words))


def node_states(events: Sequence[Event]) -> dict[str, str]:
    """Return the state of each node of the newest attempt in words, such as 'takes part' or 'lost', by name.

    A spare takes part, too.
    """
    states: dict[str, str] = {}
    for event in events:
        if event.kind == "attempt_started":
            states = dict.fromkeys(event.data.get("nodes", []), "starts")
        elif event.kind == "generation_started":
            members = event.data.get("members", [])
            lost = {node: state if state == "lost" else "left out" for node, state in states.items()}
            states = {**lost, **dict.fromkeys(members, "takes part")}
        elif event.kind in ("node_lost", "node_returned"):
            states[str(event.data.get("node", event.node))] = "lost" if event.kind == "node_lost" else "back"
    return states


def _events(events: Sequence[Event], most: int) -> Iterator[RankedLine]:
    recent = events[-most:] if most else []
    for index, event in enumerate(recent):
        rank = LAST_EVENTS + 2 * (len(recent) - 1 - index)
        yield line(rank, (f"{clock_time(event.time_s)}  {describe_event(event)}", "dim"))


def clock_time(moment: float) -> str:
    """Return the UTC time of day with a Z after it: '13:05:00Z'.

    Args:
        moment: seconds since 1970.
    """
    return f"{datetime.fromtimestamp(moment, timezone.utc):%H:%M:%S}Z"
