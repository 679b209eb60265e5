"""Show a local job on the terminal until it ends. Ctrl-C stops it at a checkpoint; a second Ctrl-C ends it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from hpctrain.base.clock import SystemClock
from hpctrain.launch.local_run import LocalJob, LocalJobResult
from hpctrain.launch.stop_signals import stop_signals
from hpctrain.records.history.run_log import Event, MetricRow
from hpctrain.report.live_run import follow
from hpctrain.report.terminal import live_lines, show

PLAIN_EVERY_S = 5.0
"""Shortest pause in seconds between two progress lines where lines cannot be rewritten in place."""


def watch(job: LocalJob, steps: int, out: TextIO, on_row: Callable[[MetricRow], None] | None = None) -> LocalJobResult:
    """Show metrics and events until the job has ended; return how it ended.

    Args:
        on_row: called with each new row of metrics.
    """
    clock = SystemClock()
    since = clock.wall()

    def stop() -> None:
        print("\nsaving a checkpoint and stopping; press Ctrl-C again to stop at once", file=out, flush=True)
        job.stop()

    items = follow(job.folder.path, clock, until=lambda: not job.running())
    in_place = out.isatty()
    with stop_signals(stop, job.kill):
        show(live_lines(_new(items, since, on_row), steps, 0.0 if in_place else PLAIN_EVERY_S), out, in_place)
    return job.wait(lambda: None)


def _new(
    items: Iterable[MetricRow | Event], since: float, on_row: Callable[[MetricRow], None] | None
) -> Iterator[MetricRow | Event]:
    """Yield items from `since` on, a time in seconds; the folder of a resumed run also holds those of earlier
    attempts."""
    for item in items:
        if item.time_s < since - 1.0:
            continue
        if on_row is not None and isinstance(item, MetricRow):
            on_row(item)
        yield item
