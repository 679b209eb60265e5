"""The model of a fault that a probe found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpctrain.records.topology.topology import Reason

Severity = Literal["note", "warn", "exclude", "refuse"]


@dataclass(frozen=True)
class ProbeFinding:
    """A fault of a node or of the whole allocation, with its severity. A check that cannot run reports no fault."""

    node: str | None
    """Name of the node; None for a fault of the whole allocation."""
    severity: Severity
    """note: a property of the cluster. warn: use the node, with a warning. exclude: go on without the node. refuse: do
    not go on."""
    reason: Reason


def make_finding(node: str | None, severity: Severity, code: str, text: str, evidence: str, fix: str) -> ProbeFinding:
    """Return a finding made from its parts.

    Args:
        text: one sentence with the numbers.
        evidence: what the figures were compared with, and how often.
        fix: what to do next, as an imperative.
    """
    return ProbeFinding(node, severity, Reason(code=code, text=text, evidence=evidence, fix=fix))
