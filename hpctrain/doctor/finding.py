"""One finding of the doctor: its level, what it means for a run, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.base.errors import EXIT_DONE, EXIT_WARNINGS

Subject = Literal["Slurm", "partitions", "containers", "torch", "network", "files"]
Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class DoctorFinding:
    """One finding, as the doctor prints it."""

    subject: Subject
    name: str
    """Name of the setting, partition, program or folder."""
    level: Level
    """ok: nothing to do. note: a disadvantage, or a missing part. problem: a run would fail or stay slow."""
    value: str
    """The value of the setting, or the state of the part."""
    words: str = ""
    """What the value means for a run."""
    todo: str = ""
    """What to do; empty where there is nothing to do."""


def exit_code(findings: Sequence[DoctorFinding]) -> int:
    """Return the exit code of `hpctrain doctor`: 3 if a finding is a problem, else 0."""
    return EXIT_WARNINGS if any(finding.level == "problem" for finding in findings) else EXIT_DONE
