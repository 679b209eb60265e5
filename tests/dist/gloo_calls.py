"""What gloo itself reports to torch's profiler, and in which order sums and actions begin and end."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch.profiler import profile

from hpctrain.parallel.pipeline import Pipeline

ELEMENT_BYTES = {"float": 4, "c10::BFloat16": 2, "int": 4, "long int": 8, "unsigned char": 1}
"""Name of a tensor's numbers in a trace -> bytes of one."""


class GlooCall(NamedTuple):
    """A collective, with the shapes of its inputs and the names of their numbers' types."""

    kind: str
    shapes: list[list[int]]
    types: list[str]


def gloo_calls(trace: profile) -> list[GlooCall]:
    """Its collectives in turn; the trace was made with `record_shapes`.

    From the trace's file, as torch's own list first makes a tree of all operations, which takes seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    calls = [event for event in events if event.get("name", "").startswith("gloo:")]
    return [
        GlooCall(
            call["name"].removeprefix("gloo:"), call["args"].get("Input Dims", []), call["args"].get("Input type", [])
        )
        for call in calls
    ]


def all_to_all_share(calls: list[GlooCall], world: int) -> float:
    """The share of the bytes of all-reduces, all-gathers and all-to-alls that all-to-alls carry."""
    shares = {"all_reduce": 2 / world, "all_gather": 1.0, "all_to_all": 1 / world}
    sent = dict.fromkeys(shares, 0.0)
    for kind, shapes, types in calls:
        if kind == "broadcast":  # the factors of scales, in a few steps
            continue
        sizes = (math.prod(shape) * ELEMENT_BYTES[name] for shape, name in zip(shapes, types, strict=True) if shape)
        sent[kind] += sum(sizes) * shares[kind]
    return sent["all_to_all"] / sum(sent.values())


@contextmanager
def sums_and_actions(pipeline: Pipeline) -> Iterator[list[str]]:
    """Yields a list that gets 'sum' when this rank begins an all-reduce or all-to-all without waiting for it, and
    'action' when a forward or backward of the pipeline ends."""
    events: list[str] = []

    def recording(collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.extend(["sum"] * bool(kwargs.get("async_op")))
            return collective(*args, **kwargs)

        return call

    ends = [patch.object(stage, "_action_ended", _before(stage, events)) for stage in pipeline.stages]
    starts = [patch.object(dist, name, recording(getattr(dist, name))) for name in ("all_reduce", "all_to_all_single")]
    for patched in (*ends, *starts):
        patched.start()
    try:
        yield events
    finally:
        for patched in (*ends, *starts):
            patched.stop()


def _before(stage: Any, events: list[str]) -> Any:
    ended = stage._action_ended
    return lambda: (events.append("action"), ended())


def early_sums(events: list[str]) -> int:
    """How many sums began before the last action ended."""
    last = max(index for index, event in enumerate(events) if event == "action")
    return events[:last].count("sum")
