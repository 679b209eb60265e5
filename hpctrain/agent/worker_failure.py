"""The model of an error that ended a worker, as its agent records it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpctrain.agent.worker_messages import WorkerError
from hpctrain.records.history.fault import Fault, fault_named


@dataclass(frozen=True)
class WorkerFailure:
    """An error that ended a worker."""

    rank: int
    sentence: str
    """One line for a person: which rank did what, kind, message and place of the error."""
    fault: Fault
    """Whose fault it is."""
    details: dict[str, Any] = field(default_factory=dict)
    """kind, message (whole), where, step and operation, as far as the worker reported them."""

    def to_event(self) -> dict[str, Any]:
        """Return the data of an event about this failure."""
        return {"rank": self.rank, "fault": self.fault.name, "error": self.details}


def failure_from_evidence(reported: WorkerFailure | None, rank: int, fault: Fault, line: str) -> WorkerFailure:
    """Return the failure of a worker that did not report whose fault its end was.

    Args:
        reported: the worker's own report, if any.
        line: the log line that names the fault.
    """
    sentence = f"rank {rank}: {fault.words}: {line}"
    if reported is None:
        return WorkerFailure(rank, sentence, fault, {"message": line})
    return WorkerFailure(rank, f"{reported.sentence}; {sentence}", fault, reported.details)


def failure_from_report(rank: int, report: WorkerError) -> WorkerFailure:
    """Return the failure that a worker reports."""
    return WorkerFailure(rank, report.sentence, fault_named(report.fault), report.details.to_json())
