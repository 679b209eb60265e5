"""Checks before a run starts whether its checkpoints will fit on its disk."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.system.disk_space import free_bytes
from hpctrain.base.units import format_bytes
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.compression import AutoCompression
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run

STATE_BYTES = 12
"""Bytes of each parameter in a checkpoint: the weight and AdamW's two moments, 4 bytes each."""


def checkpoint_space_warning(run: Run, spec: Spec, runs: Path, plan: Plan | None) -> list[str]:
    """Return what a person should know about the disk space for checkpoints, as lines.

    While a checkpoint is written, all kept ones still exist: there must be space for one more.

    Args:
        runs: the folder that run folders go to; it may not exist yet.
        plan: the plan, if known; each of its replicas saves its own compression state.
    """
    one, most = _checkpoint_bytes(run, spec, plan), run.checkpoint.keep + 1
    try:
        free = free_bytes(runs.resolve())
    except OSError as error:
        return [f"not checked before submitting: the room in {runs.resolve()} ({error.strerror})"]
    if free >= most * one:
        return []
    return [
        f"{runs.resolve()}: {format_bytes(free)} are free; {most} checkpoints of {format_bytes(one)} will need more, "
        "and one that does not fit is skipped: free some space, lower checkpoint.keep, or set HPCTRAIN_RUNS"
    ]


def _checkpoint_bytes(run: Run, spec: Spec, plan: Plan | None) -> float:
    """Return the bytes of one checkpoint. Without a plan, the compression state of a single replica is counted."""
    copies = 1 if plan is None else plan.dp // plan.shards
    codec = run.compression if plan is None else plan.codec
    codec_state = 0.0
    if not isinstance(codec, AutoCompression) and (plan is None or copies > 1):
        codec_state = copies * codec.state_bytes(spec.dim)
    return (STATE_BYTES + codec_state) * spec.parameters()
