"""Describes the error that ended a worker: its fault, class and message, and the line that raised it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

from hpctrain.agent.worker_messages import TEXT_CHARS
from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import HpctrainError
from hpctrain.model.imported.user_error import innermost_frame, raised_in
from hpctrain.records.history.fault import EXCEPTION, Fault, fault_named, fault_of

SENTENCE_CHARS = 1000
"""Largest number of characters of the error's message in a reason."""
_BOILERPLATE = "CUDA kernel errors might be asynchronously reported"
"""Start of the lines that torch adds to every CUDA error."""


@dataclass(frozen=True)
class Failure:
    """An error that ended a worker."""

    kind: str
    """Name of the exception class."""
    message: str
    where: str | None
    """Place of the error, as '/…/code/model.py:12 in forward'; None for an error of hpctrain itself, whose message is
    enough.
    """
    line: str | None
    """Number, file and text of the line of code that raised the error, for the user."""
    fault: Fault

    def sentence(self, at: str) -> str:
        """Return one line for the user.

        Args:
            at: which rank failed in which operation, from `place_now`.
        """
        if self.where is None:
            return _one_line(self.message)
        if self.fault.blame == "network":
            return f"{at}: {(self.message.splitlines() or [self.kind])[0][:SENTENCE_CHARS]}"
        message = _one_line(self.message.partition(_BOILERPLATE)[0]) or "without a message"
        blamed = f" [{self.fault.words}]" if self.fault.name != EXCEPTION else ""
        return f"{at}: {self.kind}: {message} ({self.line}){blamed}"


def failure_of(error: BaseException) -> Failure:
    """Return the failure that describes an error."""
    cause = _cause(error)
    kind, message = type(cause).__name__, str(cause).strip()[:TEXT_CHARS]
    if isinstance(cause, HpctrainError):
        # The cause of the wrapped error may be an error of the system, which says more about the fault.
        faults = [_fault_of(known) for known in (cause, cause.__cause__) if known is not None]
        return Failure(kind, message, None, None, next((row for row in faults if row.name != EXCEPTION), faults[0]))
    frame = innermost_frame(cause, "user") or innermost_frame(cause, "hpctrain") or innermost_frame(cause)
    if frame is None:
        return Failure(kind, message, "unknown", "place unknown", _fault_of(cause))
    where, line = f"{frame.filename}:{frame.lineno} in {frame.name}", f"line {frame.lineno} of {frame.filename}"
    return Failure(kind, message, where, f"{line}: {frame.line}" if frame.line else line, _fault_of(cause))


def _fault_of(error: BaseException) -> Fault:
    """Return the error's row of the fault table.

    A time-out in code outside of torch and hpctrain is no network fault, because it loses no rank.
    """
    fault = fault_of(str(error), [known.__name__ for known in type(error).__mro__])
    outside = raised_in(error) not in (None, "torch", "hpctrain")
    return fault_named(EXCEPTION) if fault.blame == "network" and outside else fault


def place_now() -> str:
    """Return this rank and its current operation, as 'rank 1 in step 3, reduce dp'."""
    now = ACTIVITY.now
    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "?")
    return f"rank {rank} in step {now.step}, {now.words()}"


def _cause(error: BaseException) -> BaseException:
    """Return the error that torch wrapped, or the error itself.

    The error that torch's pipeline raises contains the arguments of a stage, but not the stage's own message.
    """
    while error.__cause__ is not None and raised_in(error) == "torch":
        error = error.__cause__
    return error


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SENTENCE_CHARS else f"{line[:SENTENCE_CHARS]} …"
