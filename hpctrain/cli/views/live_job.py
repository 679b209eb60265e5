"""Watching a local job on the terminal until it ends; Ctrl-C once stops at a checkpoint, twice at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from hpctrain.base.clock import SystemClock
from hpctrain.launch.local_run.supervise import LocalJob, LocalJobResult
from hpctrain.records.history.event import Event
from hpctrain.records.history.metric import MetricRow
from hpctrain.report.follow_files import follow
from hpctrain.report.terminal import live_lines, show

PLAIN_EVERY_S = 5.0
"""Fewest seconds between two progress lines where they cannot be rewritten in place."""


def watch(job: LocalJob, steps: int, out: TextIO, on_row: Callable[[MetricRow], None] | None = None) -> LocalJobResult:
    """Show rows and events until the job has ended; how it ended comes back.

    Args:
        on_row: called with each new row of metrics.
    """
    clock = SystemClock()
    since = clock.wall()
    asked = _interrupts(job, out)
    items = follow(job.folder.path, clock, until=lambda: not job.running())
    in_place = out.isatty()
    show(live_lines(_new(items, since, on_row), steps, 0.0 if in_place else PLAIN_EVERY_S), out, in_place)
    signal.signal(signal.SIGINT, asked)
    return job.wait(lambda: None)


def _new(
    items: Iterable[MetricRow | Event], since: float, on_row: Callable[[MetricRow], None] | None
) -> Iterator[MetricRow | Event]:
    """A resumed run's folder still holds the earlier attempts; only what is new is shown."""
    for item in items:
        if item.time_s < since - 1.0:
            continue
        if on_row is not None and isinstance(item, MetricRow):
            on_row(item)
        yield item


def _interrupts(job: LocalJob, out: TextIO) -> signal.Handlers:
    presses = 0

    def interrupted(*_: object) -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            print("\nsaving a checkpoint and stopping; press Ctrl-C again to stop at once", file=out, flush=True)
            job.stop()
        else:
            job.kill()

    signal.signal(signal.SIGTERM, interrupted)
    previous = signal.signal(signal.SIGINT, interrupted)
    return previous if isinstance(previous, signal.Handlers) else signal.SIG_DFL
