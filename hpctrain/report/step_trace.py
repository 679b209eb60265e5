"""A recorded step as a trace in Chrome's format, which ui.perfetto.dev, chrome://tracing and Perfetto's trace processor
read: a process for each rank with its threads, and arrows from sends to receives. Pure.

The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.records.history.step_spans import RankSpans, SpanKind, StepSpans

PREDICTED_PID = 1_000_000
"""Process number of rank 0's prediction; those of the other ranks follow."""
THREADS = {1: "computation", 2: "communication", 3: "communication beside computation"}
"""Thread number -> its name."""
_THREAD: dict[SpanKind, int] = {"compute": 1, "device": 1, "pp": 2, "dp": 2, "world": 2, "hidden": 3}
_MESSAGE = re.compile(r"(send|recv) (.+ mb \d+) (?:to|from) rank (\d+)")


@dataclass(frozen=True)
class PredictedSpan:
    """An operation of a rank in the predicted step."""

    rank: int
    name: str
    start_s: float
    """Seconds from the start of the step."""
    end_s: float
    kind: SpanKind
    """As in `SpanKind`."""


def step_trace(record: StepSpans, predicted: Sequence[PredictedSpan] = ()) -> dict[str, Any]:
    """Return a trace as JSON values. Times are in microseconds; 0 is the start of the step on the first rank that
    began it.

    Args:
        record: the recorded step.
        predicted: the same step as the planner predicted it; its processes stand beside those of the ranks.
    """
    begun_s = min((start for rank in record.ranks for _, start, _, _ in rank.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in record.ranks:
        spans = [*_merged_hidden(rank), *(span for span in rank.spans if span[3] != "hidden")]
        events += _process(rank.rank, f"rank {rank.rank} ({rank.device})", {_THREAD[span[3]] for span in spans})
        events += [_slice(rank.rank, *span, begun_s) for span in spans]
    for number in sorted({span.rank for span in predicted}):
        of_rank = [span for span in predicted if span.rank == number]
        pid = PREDICTED_PID + number
        events += _process(pid, f"rank {number}, predicted", {_THREAD[span.kind] for span in of_rank})
        events += [_slice(pid, span.name, span.start_s, span.end_s, span.kind, 0.0) for span in of_rank]
    events += _flows(record.ranks, begun_s)
    about = {"step": record.step, "generation": record.generation, "ranks": len(record.ranks)}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def _process(pid: int, name: str, threads: Iterable[int]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    # A rank's prediction stands right below the rank.
    order = 2 * (pid % PREDICTED_PID) + (pid >= PREDICTED_PID)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}}
    for tid in sorted(threads):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": THREADS[tid]}}


def _slice(pid: int, name: str, start_s: float, end_s: float, kind: SpanKind, begun_s: float) -> dict[str, Any]:
    start_us, end_us = round(1e6 * (start_s - begun_s)), round(1e6 * (end_s - begun_s))
    return {"ph": "X", "name": name, "cat": kind, "ts": start_us, "dur": end_us - start_us, "pid": pid,
            "tid": _THREAD[kind]}  # fmt: skip


def _merged_hidden(rank: RankSpans) -> Iterator[tuple[str, float, float, SpanKind]]:
    """Yield the times in which at least one message was under way beside the computation."""
    start_s = end_s = None
    for name, start, end, kind in sorted(rank.spans, key=lambda span: span[1]):
        if kind != "hidden":
            continue
        if end_s is None or start > end_s:
            if start_s is not None and end_s is not None:
                yield name, start_s, end_s, kind
            start_s, end_s = start, end
        end_s = max(end_s, end)
    if start_s is not None and end_s is not None:
        yield "messages under way", start_s, end_s, "hidden"


def _flows(ranks: Sequence[RankSpans], begun_s: float) -> Iterator[dict[str, Any]]:
    """Yield the two ends of an arrow for each message between stages whose send and receive were recorded."""
    sends: dict[tuple[str, int, int], float] = {}
    receives: dict[tuple[str, int, int], tuple[float, float]] = {}
    for rank in ranks:
        for name, start, end, _ in rank.spans:
            message = _MESSAGE.fullmatch(name)
            if message and message[1] == "send":
                # A send is recorded again when its end is waited for.
                sends.setdefault((message[2], rank.rank, int(message[3])), start)
            elif message:
                receives[message[2], int(message[3]), rank.rank] = start, end
    for number, key in enumerate(sorted(sends.keys() & receives.keys())):
        (start, end), common = receives[key], {"name": "message", "cat": "message", "id": number}
        sent_us, received_us = round(1e6 * (sends[key] - begun_s)), round(1e6 * ((start + end) / 2 - begun_s))
        yield {"ph": "s", "ts": sent_us, "pid": key[1], "tid": 2, **common}
        yield {"ph": "f", "bp": "e", "ts": max(sent_us, received_us), "pid": key[2], "tid": 2, **common}
