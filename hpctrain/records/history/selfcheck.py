"""The result of `hpctrain selfcheck`: a row for each path on each node, and facts about each node."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from hpctrain.records.format.document import Document, Part

PathVerdict = Literal["ok", "slow", "failed", "left out"]
SUMMARY_CHARS = 1000
"""Longest text of a row; an error of a process can be any length."""


class CheckOrder(Document):
    """What a process of `hpctrain selfcheck` is asked to do. The check of one path has `world` such processes, each
    with a rank."""

    schema_kind: ClassVar[str] = "check_order"

    check: str
    """Name of the check in `hpctrain.worker.checks`."""
    folder: str
    """Folder of this path alone. A check that trains finds its run.yaml and its plan there."""
    device: Literal["cpu", "cuda"]
    rank: int = Field(default=0, ge=0)
    world: int = Field(default=1, ge=1)
    reference: list[float] = []
    """Losses of the same run on one process; empty for a check without a reference."""


class CheckResult(Document):
    """What a check found, as rank 0 writes it."""

    schema_kind: ClassVar[str] = "check_result"

    figure: str = ""
    """What was measured, with its unit."""
    expected: str = ""
    """What a right result is, in words: 'a falling loss', '≤ 0.01'."""
    verdict: PathVerdict = "ok"
    losses: list[float] = []
    """Losses of the steps, for a check that is the reference of others."""


class PathResult(Part):
    """A row of the table that `hpctrain selfcheck` prints: what came of one path on one node. A path is a way to train
    or to use a device that the check tries."""

    path: str
    """Name of the path."""
    verdict: PathVerdict
    """What came of the path. slow: it works, but reaches less than expected. left out: it cannot run on these nodes."""
    figure: str = Field(default="", max_length=SUMMARY_CHARS)
    """What was measured; for a failed path its error, for one that was left out the reason."""
    expected: str = ""
    """What a path without a fault shows; empty if there is nothing to compare with."""
    next_step: str = ""
    """What to do about a slow or failed path; empty for the others."""
    seconds: float = Field(ge=0)
    """Duration of the check, seconds."""
    node: str = ""
    """Node that the row is about; empty if it is about no single one."""


class SelfcheckReport(Document):
    """The file of `hpctrain selfcheck -o`, which can be attached to a report of a bug. It holds neither environment
    variables nor user names."""

    schema_kind: ClassVar[str] = "selfcheck"

    version: str
    """Version of hpctrain."""
    created: str
    """Time of the check, ISO 8601, UTC."""
    machines: dict[str, dict[str, Any]]
    """For each node its software and its devices: Python, torch, CUDA or ROCm, NCCL, kernel, processor, GPUs."""
    paths: list[PathResult]
    """Rows of the table that the check prints: one for each path and node."""
    topology: dict[str, Any] | None = None
    """The topology file that the probe measured; absent if it measured none."""
