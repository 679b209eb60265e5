"""What gloo itself reports to torch's profiler, and in which order sums and actions begin and end."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from torch.profiler import profile

from hpctrain.compress.collectives.overlapped_work import OverlappedWork
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

    From the trace's file, as torch's own list first makes a tree of all operations, which takes seconds. Reading all of
    the file would, too: only objects that begin with the name of a collective are read.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        text = path.read_text()
    names = (match.start() for match in re.finditer('"name": "gloo:', text))
    calls = [json.JSONDecoder().raw_decode(text, text.rindex("{", 0, start))[0] for start in names]
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
def sums_of_rank() -> Iterator[list[str]]:
    """Yields a list that gets 'sum' when this rank begins an all-reduce or all-to-all that it waits for later, and
    'wait' when it waits for the end of one."""
    events: list[str] = []
    begins = patch.object(OverlappedWork, "__init__", _recording(OverlappedWork.__init__, "sum", events))
    waits = patch.object(OverlappedWork, "wait", _recording(OverlappedWork.wait, "wait", events))
    with begins, waits:
        yield events


@contextmanager
def sums_and_actions(pipeline: Pipeline) -> Iterator[list[str]]:
    """As `sums_of_rank`, with 'action' when a forward or backward of the pipeline ends."""
    with sums_of_rank() as events, ExitStack() as patches:
        for stage in pipeline.stages:
            ended = _recording(stage._action_ended, "action", events)
            patches.enter_context(patch.object(stage, "_action_ended", ended))
        yield events


def _recording(method: Any, event: str, events: list[str]) -> Any:
    def call(*args: Any) -> Any:
        events.append(event)
        return method(*args)

    return call


def early_sums(events: list[str]) -> int:
    """How many sums began before the last action ended."""
    last = max(index for index, event in enumerate(events) if event == "action")
    return events[:last].count("sum")


def most_under_way(events: list[str], when: str) -> int:
    """How many sums had begun that the rank had not waited for yet, at the most, before events of the kind `when`."""
    before = [events[:index] for index, event in enumerate(events) if event == when]
    return max(part.count("sum") - part.count("wait") for part in before)
