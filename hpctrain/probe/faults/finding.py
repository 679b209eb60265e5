"""One thing that a probe found wrong: of a node or of the allocation, with what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpctrain.records.topology.topology import Reason

Severity = Literal["note", "warn", "exclude", "refuse"]


@dataclass(frozen=True)
class ProbeFinding:
    """A fault. A check that could not run makes none."""

    node: str | None
    """None: of the whole allocation."""
    severity: Severity
    """note: how the cluster is. warn: go on, knowing it. exclude: go on without this node. refuse: do not go on."""
    reason: Reason


def make_finding(node: str | None, severity: Severity, code: str, text: str, evidence: str, fix: str) -> ProbeFinding:
    """A finding from its parts.

    Args:
        text: one sentence with the numbers.
        evidence: what it was compared with, how often.
        fix: what to do next, as an imperative.
    """
    return ProbeFinding(node, severity, Reason(code=code, text=text, evidence=evidence, fix=fix))
