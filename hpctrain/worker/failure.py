"""What a worker says of its own end: whose fault, what kind of error, its whole message, and where it was raised."""

from __future__ import annotations

import os
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import HpctrainError
from hpctrain.records.history.fault import EXCEPTION, Fault, fault_named, fault_of

MESSAGE_CHARS = 8000
"""Characters of a message that travel; the log has all of it."""
SENTENCE_CHARS = 1000
"""Characters of it in a reason."""
_HOUSE = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_LIBRARIES = (_TORCH, Path(sysconfig.get_paths()["stdlib"]), Path(sysconfig.get_paths()["purelib"]))
_BOILERPLATE = "CUDA kernel errors might be asynchronously reported"
"""Begins the lines that torch adds to every error of CUDA."""


@dataclass(frozen=True)
class Failure:
    """An error that ended a worker."""

    kind: str
    """Name of its class."""
    message: str
    where: str | None
    """'/…/code/model.py:12 in forward'; None for an error that hpctrain raised on purpose, whose message says all."""
    line: str | None
    """The line of code there, with its number and file, for a person."""
    fault: Fault

    def sentence(self, at: str) -> str:
        """One line for a person.

        Args:
            at: which rank was doing what.
        """
        if self.where is None:
            return _one_line(self.message)
        if self.fault.blame == "network":
            return f"{at}: {(self.message.splitlines() or [self.kind])[0][:SENTENCE_CHARS]}"
        said = _one_line(self.message.partition(_BOILERPLATE)[0]) or "without a message"
        whose = f" [{self.fault.words}]" if self.fault.name != EXCEPTION else ""
        return f"{at}: {self.kind}: {said} ({self.line}){whose}"

    def to_message(self) -> dict[str, Any]:
        """Plain values for the agent."""
        return {"kind": self.kind, "message": self.message, "where": self.where, "fault": self.fault.name}


def failure_of(error: BaseException) -> Failure:
    """What is known of an error."""
    cause = _cause(error)
    kind, message = type(cause).__name__, str(cause).strip()[:MESSAGE_CHARS]
    if isinstance(cause, HpctrainError):
        # It may stand for an error of the system, which knows better whose fault it is.
        faults = [_fault_of(known) for known in (cause, cause.__cause__) if known is not None]
        return Failure(kind, message, None, None, next((row for row in faults if row.name != EXCEPTION), faults[0]))
    frame = _frame(cause)
    if frame is None:
        return Failure(kind, message, "unknown", "place unknown", _fault_of(cause))
    where, line = f"{frame.filename}:{frame.lineno} in {frame.name}", f"line {frame.lineno} of {frame.filename}"
    return Failure(kind, message, where, f"{line}: {frame.line}" if frame.line else line, _fault_of(cause))


def _fault_of(error: BaseException) -> Fault:
    """The row of the table. Code that is not torch's or hpctrain's may speak of a time-out, and of one with anybody: no
    rank is lost by it."""
    fault = fault_of(str(error), [known.__name__ for known in type(error).__mro__])
    outside = error.__traceback__ is not None and not _is_within(_innermost(error), (_TORCH, _HOUSE))
    return fault_named(EXCEPTION) if fault.blame == "network" and outside else fault


def place_now() -> str:
    """'rank 1 in step 3, reduce dp': which rank this is, and what it does."""
    now = ACTIVITY.now
    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "?")
    return f"rank {rank} in step {now.step}, {now.words()}"


def _cause(error: BaseException) -> BaseException:
    """The error itself, or what it wraps where torch raised it over another one: its pipeline reports the arguments of
    a stage and not what the stage said."""
    while error.__cause__ is not None and _is_within(_innermost(error), (_TORCH,)):
        error = error.__cause__
    return error


def _innermost(error: BaseException) -> Path:
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename) if frames else Path()


def _frame(error: BaseException) -> traceback.FrameSummary | None:
    """The last line that the person wrote on the way to the error, else the last of hpctrain, else the last of all."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if not _is_within(Path(frame.filename), (*_LIBRARIES, _HOUSE))]
    house = [frame for frame in frames if _is_within(Path(frame.filename), (_HOUSE,))]
    candidates = own or house or frames
    return candidates[-1] if candidates else None


def _is_within(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders) or str(path).startswith("<frozen ")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SENTENCE_CHARS else f"{line[:SENTENCE_CHARS]} …"
