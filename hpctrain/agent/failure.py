"""What a worker said of its own end, as its agent takes it down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpctrain.base.wire import Message
from hpctrain.records.fault import Fault, fault_named

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
    """kind, message (whole), where, step and operation, as far as the worker said them."""

    def to_event(self) -> dict[str, Any]:
        """What an event says of it."""
        return {"rank": self.rank, "fault": self.fault.name, "error": self.details}


def failure_from(rank: int, message: Message) -> WorkerFailure:
    """The content of a worker's `error` or `lost` message."""
    said = message.get("error")
    said = said if isinstance(said, dict) else {}
    details = {name: said[name] for name in _DETAILS if said.get(name) is not None}
    return WorkerFailure(rank, str(message.get("message")), fault_named(said.get("fault")), details)
