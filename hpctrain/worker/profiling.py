"""torch's profiler around one step of a worker. If the run file sets `profile.step`, each rank writes a trace with the
operations of that step as named spans.

A span has the name that the operation has in the `ActivityRecord` of the process: 'forward stage 1 mb 3' (micro-batch
3), 'recv output of stage 0 mb 3 from rank 0', 'reduce dp', 'optimizer', 'checkpoint copy'.
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
    """Return the path within a run folder of the profiler's trace of one step on one rank."""
    return folder / "profile" / f"step-{step}.rank-{rank}.json.gz"


@contextlib.contextmanager
def profiled(path: Path) -> Iterator[None]:
    """Profile the code of the `with` block and write a Chrome trace to `path`. If the trace cannot be written, the
    reason is logged and the run goes on."""
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
    # The trace gets a temporary name first, so that the folder shows only whole traces. The name's ending decides the
    # format.
    temporary = path.with_name(f".{path.name}")
    profiler.export_chrome_trace(str(temporary))
    temporary.rename(path)
