"""Why a worker ended, as its agent records it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpctrain.base.net.wire import Message
from hpctrain.records.history.fault import Fault, fault_named

_DETAILS = ("kind", "message", "where", "step", "operation")


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


def failure_from_evidence(said: WorkerFailure | None, rank: int, fault: Fault, line: str) -> WorkerFailure:
    """Return the failure of a worker that did not report whose fault its end was.

    Args:
        said: the worker's own report, if any.
        line: the log line that names the fault.
    """
    before = f"{said.sentence}; " if said is not None else ""
    sentence = f"{before}rank {rank}: {fault.words}: {line}"
    return WorkerFailure(rank, sentence, fault, said.details if said is not None else {"message": line})


def failure_from_message(rank: int, message: Message) -> WorkerFailure:
    """Return the failure that a worker's `error` or `lost` message reports."""
    said = message.get("error")
    said = said if isinstance(said, dict) else {}
    details = {name: said[name] for name in _DETAILS if said.get(name) is not None}
    return WorkerFailure(rank, str(message.get("message")), fault_named(said.get("fault")), details)
