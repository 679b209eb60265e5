"""The messages between an agent and its workers: orders to the workers, reports from them.

Both sides send and read only these models. The side that reads a malformed message ends the connection with an error.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from hpctrain.base.net.wire import Message
from hpctrain.records.format.document import Part
from hpctrain.records.format.message import parse_message

TEXT_CHARS = 8000


def _sendable(text: object) -> object:
    """Return a text cut to `TEXT_CHARS`, with bytes of file names that are no text escaped."""
    return text.encode(errors="backslashreplace").decode()[:TEXT_CHARS] if isinstance(text, str) else text


Name = Annotated[str, Field(max_length=TEXT_CHARS)]
Sentence = Annotated[str, BeforeValidator(_sendable)]
"""Text for the user; a longer one is cut, and the worker's log has all of it."""
Count = Annotated[int, Field(ge=0)]


class StoreConnection(Part):
    """How a worker reaches the TCPStore of its generation's process group."""

    addr: Name
    port: Annotated[int, Field(gt=0, lt=1 << 16)]
    secret: Annotated[str, Field(max_length=TEXT_CHARS, repr=False)]
    """Prefix of every key that the generation's workers write to the store."""
    fd: Count | None = None
    """Descriptor of the listening socket that the worker of rank 0 inherits and serves; None for the others."""


class StartOrder(Part):
    """Order to train one rank of a generation."""

    kind: Literal["start"] = "start"
    plan: Name
    """Path of the plan in the run folder."""
    rank: Count
    generation: Count
    store: StoreConnection
    restore: Name | None = None
    """Path of a verified checkpoint in the run folder; None: start from the seed."""


class StopOrder(Part):
    """Order to save a checkpoint and exit."""

    kind: Literal["stop"] = "stop"


class WorkerReady(Part):
    """Report: the worker has built its model and begins to train."""

    kind: Literal["ready"] = "ready"
    step: Count


class Compiling(Part):
    """Report: the worker compiles blocks until it reports the next step."""

    kind: Literal["compiling"] = "compiling"


class StepDone(Part):
    """Report: an optimizer step is done."""

    kind: Literal["step"] = "step"
    step: Count
    loss: float


class CheckpointSaved(Part):
    """Report: the writer of a checkpoint has ended; with an error, the checkpoint was not published."""

    kind: Literal["saved"] = "saved"
    step: Count
    seconds: float
    size_bytes: Count
    error: Sentence | None = None


class NoDiskSpace(Part):
    """Report: the worker waits for disk space for the last writes of the run."""

    kind: Literal["no_room"] = "no_room"
    step: Count
    reason: Sentence


class Waiting(Part):
    """Report: the worker still waits for disk space."""

    kind: Literal["waiting"] = "waiting"


class ResidualsDropped(Part):
    """Report: the residuals in the checkpoint were not restored."""

    kind: Literal["residuals_dropped"] = "residuals_dropped"
    reason: Sentence


class WeightsHash(Part):
    """Report: the hash of the trained weights."""

    kind: Literal["weights"] = "weights"
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ErrorDetails(Part):
    """An error as the events and `status` show it."""

    kind: Name
    """Name of the exception class."""
    message: Sentence
    where: Sentence | None = None
    """Place of the error, as '/…/code/model.py:12 in forward'; None for an error of hpctrain itself, whose message is
    enough."""
    step: Count
    operation: Sentence


class WorkerError(Part):
    """Report: why the worker ends, by an error of its own or because it lost a peer."""

    kind: Literal["error", "lost"]
    sentence: Sentence
    """One line for the user: which rank did what, and kind, message and place of the error."""
    fault: Name
    """Name of its row in the fault table."""
    details: ErrorDetails


Order = StartOrder | StopOrder
Progress = WorkerReady | Compiling | StepDone | CheckpointSaved | NoDiskSpace | Waiting | ResidualsDropped | WeightsHash
Report = Progress | WorkerError

_ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])
_REPORT: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


def read_order(message: Message) -> Order:
    """Parse an order of the agent.

    Raises:
        MalformedMessage: the message does not fit the model.
    """
    return parse_message(_ORDER, message)


def read_report(message: Message) -> Report:
    """Parse a report of a worker.

    Raises:
        MalformedMessage: the message does not fit the model.
    """
    return parse_message(_REPORT, message)
