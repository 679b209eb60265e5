"""Records the steps that `profile` in the run file names: that of `profile.step` with torch's profiler, and of those in
`profile.spans` when each rank's operations began and ended.

A span has the name that the operation has in the `ActivityRecord` of the process: 'forward stage 1 mb 3' (micro-batch
3), 'recv output of stage 0 mb 3 from rank 0', 'reduce dp', 'optimizer', 'checkpoint copy'.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from hpctrain.base.activity import ACTIVITY, ActivitySpan
from hpctrain.base.atomic import write_text
from hpctrain.base.errors import StorageError
from hpctrain.records.history.step_spans import RankSpans, StepSpans, spans_file
from hpctrain.worker.build import Trainer

REFERENCE = "all-gather of metrics"
"""Operation whose end is time 0 of the spans on each rank."""
SPANS_MAX = 200_000
"""Most spans of a step that all ranks together record, unless each of them records at most 100."""


@contextlib.contextmanager
def recorded_step(trainer: Trainer) -> Iterator[None]:
    """Record the step in the `with` block as the run file wants it; of most steps, nothing is recorded. Collective over
    all ranks if the step is one of `profile.spans`.

    Raises:
        Superseded: the generation is over.
    """
    step, settings = trainer.step + 1, trainer.run.profile
    with contextlib.ExitStack() as stack:
        if step in settings.spans:
            stack.enter_context(_recorded_spans(trainer))
        if step == settings.step:
            stack.enter_context(_profiled(_trace_path(trainer.folder, step, trainer.coordinate.rank)))
        yield


@contextlib.contextmanager
def _recorded_spans(trainer: Trainer) -> Iterator[None]:
    """Record the step's spans in the `with` block, and let rank 0 write those of all ranks. If the file cannot be
    written, the run goes on."""
    step, start_s = trainer.step + 1, time.monotonic()
    with ACTIVITY.recorded(max(100, SPANS_MAX // trainer.plan.world_size)) as spans:
        yield
    spans.append(ActivitySpan(f"step {step}", start_s, time.monotonic(), "compute"))
    zero_s = next((span.end_s for span in reversed(spans) if span.operation == REFERENCE), start_s)
    here = [(name, round(start - zero_s, 6), round(end - zero_s, 6), kind) for name, start, end, kind in spans]
    everyone: list[object] | None = [None] * trainer.plan.world_size if trainer.coordinate.rank == 0 else None
    with ACTIVITY.doing("gather the spans", waits="world"):
        dist.gather_object(here, everyone)
    if everyone is None:
        return
    ranks = [
        RankSpans.model_validate({"rank": rank, "device": trainer.plan.ranks[rank], "spans": spans_of_rank})
        for rank, spans_of_rank in enumerate(everyone)
    ]
    record = StepSpans(step=step, generation=trainer.generation, ranks=ranks)
    path = spans_file(trainer.folder, step)
    trainer.fence.check()
    with contextlib.suppress(StorageError, OSError):
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(record.to_json(), allow_nan=False))


def _trace_path(folder: Path, step: int, rank: int) -> Path:
    """Return the path within a run folder of the profiler's trace of one step on one rank."""
    return folder / "profile" / f"step-{step}.rank-{rank}.json.gz"


@contextlib.contextmanager
def _profiled(path: Path) -> Iterator[None]:
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
