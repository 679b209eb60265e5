"""torch's profiler around one step: a trace of each rank, with the step's parts as named spans.

A span is called as the activity record calls the operation: 'forward stage 1 mb 3', 'recv output of stage 0 mb 3 from
rank 0', 'reduce dp', 'optimizer', 'checkpoint copy'.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hpctrain.base.activity import ACTIVITY


def trace_path(folder: Path, step: int, rank: int) -> Path:
    """Where the trace of a step lies within a run folder."""
    return folder / "profile" / f"step-{step}.rank-{rank}.json.gz"


@contextlib.contextmanager
def profiled(path: Path) -> Iterator[None]:
    """Record what happens in the block and write it as a Chrome trace. A trace that cannot be written costs nothing
    but itself: the reason goes to the worker's log."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=kinds) as profiler:
        ACTIVITY.annotate = record_function
        try:
            yield
        finally:
            ACTIVITY.annotate = None
    try:
        with ACTIVITY.doing("write the profile"):
            _write(profiler, path)
    except (OSError, RuntimeError) as error:
        print(f"hpctrain worker: {path}: the profile was not written: {error}", file=sys.stderr)


def _write(profiler: profile, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    # Under another name first: whoever looks into the folder finds whole traces only. The ending decides the format.
    temporary = path.with_name(f".{path.name}")
    profiler.export_chrome_trace(str(temporary))
    temporary.rename(path)
