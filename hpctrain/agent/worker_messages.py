"""The messages between an agent and its workers: orders of the agent, and reports of the workers.

Both sides send and read only these models. The side that reads a malformed message ends the connection with an
error.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from hpctrain.agent.hang_report import MAX_WORKERS_PER_NODE
from hpctrain.base.net.wire import Message
from hpctrain.records.format.document import Part
from hpctrain.records.format.message import parse_message
from hpctrain.records.history.memory_state import MemorySource

TEXT_CHARS = 8000
"""Most characters of a text in a message."""


def _sendable(text: object) -> object:
    """Return a text cut to `TEXT_CHARS` characters, and any other value unchanged. Bytes of file names that are not
    valid text are escaped."""
    return text.encode(errors="backslashreplace").decode()[:TEXT_CHARS] if isinstance(text, str) else text


Name = Annotated[str, Field(max_length=TEXT_CHARS)]
Sentence = Annotated[str, BeforeValidator(_sendable)]
"""Text for the user, cut to `TEXT_CHARS` characters; the worker's log has the whole text."""
Count = Annotated[int, Field(ge=0)]


class StoreConnection(Part):
    """How a worker reaches the TCPStore through which the ranks of its generation find each other."""

    addr: Name
    """Address of the node of rank 0, whose worker serves the store."""
    port: Annotated[int, Field(gt=0, lt=1 << 16)]
    """TCP port of the store."""
    secret: Annotated[str, Field(max_length=TEXT_CHARS, repr=False)]
    """Prefix of every key that the generation's workers write to the store."""
    fd: Count | None = None
    """Descriptor of the store's listening socket, which the worker of rank 0 inherits and serves; None for the other
    workers."""


class SnapshotMemory(Part):
    """The two memories in which the snapshots of a rank's state lie in turn."""

    rank: Count
    """Rank whose state it is."""
    descriptors: Annotated[tuple[Count, Count], Field(strict=False)]


class MemoryOrder(Part):
    """The shared memory in which a worker's training state outlives the worker. Its descriptors are inherited."""

    live: Count | None = None
    """Descriptor of the worker's own segment: empty memory, or the segment that the worker continues on. None on a GPU
    and with `recovery.memory: snapshots`: only snapshots outlive the worker."""
    source: MemorySource | None = None
    """State in memory from which the generation starts; None: it starts from a checkpoint or the first weights."""
    segments: Annotated[tuple[Count, ...], Field(max_length=MAX_WORKERS_PER_NODE, strict=False)] = ()
    """Descriptors of old segments that this worker reads for all ranks; no other worker gets them."""

    snapshots: Annotated[tuple[SnapshotMemory, ...], Field(max_length=MAX_WORKERS_PER_NODE, strict=False)] = ()
    """Memory for snapshots of the worker's own state and of states of ranks on other nodes; empty: none are made."""

    @property
    def descriptors(self) -> list[int]:
        """Return all descriptors, which the worker inherits."""
        snapshots = [descriptor for memory in self.snapshots for descriptor in memory.descriptors]
        return [*([] if self.live is None else [self.live]), *self.segments, *snapshots]


class StartOrder(Part):
    """Order to train one rank of a generation."""

    kind: Literal["start"] = "start"
    plan: Name
    """Path of the generation's plan, relative to the run folder."""
    rank: Count
    generation: Count
    store: StoreConnection
    restore: Name | None = None
    """Path of a verified checkpoint, relative to the run folder; None: the run begins with its first weights. With
    `memory.source` it is not read."""
    memory: MemoryOrder | None = None
    """The memory for the worker's state; None: the state is the worker's alone."""


class StopOrder(Part):
    """Order to save a checkpoint and exit."""

    kind: Literal["stop"] = "stop"


class ChangePlanOrder(Part):
    """Order to end the generation after the step under way, because the next one runs another plan."""

    kind: Literal["change_plan"] = "change_plan"
    save: bool = False
    """Whether to save a checkpoint first, because the nodes of the other plan do not hold the whole state."""


class WorkerReady(Part):
    """Report: the worker has built its part of the model and begins to train."""

    kind: Literal["ready"] = "ready"
    step: Count
    """Number of steps done before."""


class Compiling(Part):
    """Report: the worker compiles blocks until it reports the next step."""

    kind: Literal["compiling"] = "compiling"


class StepDone(Part):
    """Report: an optimizer step is done."""

    kind: Literal["step"] = "step"
    step: Count
    """Number of the step, counted from 1."""
    loss: float
    """Loss of the global batch in nats: the mean over its targets."""


class CheckpointSaved(Part):
    """Report: the writer of a checkpoint has ended; with an error, the checkpoint was not published."""

    kind: Literal["saved"] = "saved"
    step: Count
    """Number of optimizer steps that the saved state has made."""
    seconds: float
    """Seconds from the start of the save to its end."""
    size_bytes: Count
    """Size of the checkpoint: the files of all ranks."""
    error: Sentence | None = None
    """Why the checkpoint was not published; None if it was."""


class NoDiskSpace(Part):
    """Report: the disk is full, and the worker waits for space for the last writes of the run."""

    kind: Literal["no_room"] = "no_room"
    step: Count
    """The last step that the worker made, to which these writes belong."""
    reason: Sentence
    """What could not be written and how long the run waits, in one sentence for the user."""


class Waiting(Part):
    """Report, sent every few seconds: the worker still waits for disk space, so it does not hang."""

    kind: Literal["waiting"] = "waiting"


class ResidualsDropped(Part):
    """Report: the worker did not restore all residuals in the checkpoint or in memory."""

    kind: Literal["residuals_dropped"] = "residuals_dropped"
    reason: Sentence
    """Which residuals, and why, in one sentence for the user."""


class WeightsHash(Part):
    """Report of a deterministic run: the SHA-256 hash of the trained weights."""

    kind: Literal["weights"] = "weights"
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ErrorDetails(Part):
    """An error of a worker, as the events and `status` show it."""

    kind: Name
    """Name of the exception class."""
    message: Sentence
    """The exception's message."""
    where: Sentence | None = None
    """Place of the error, as '/…/code/model.py:12 in forward'; None for an `HpctrainError`, whose message is
    enough."""
    step: Count
    """Step in which the error happened; 0 before the first step."""
    operation: Sentence
    """The worker's operation at that moment, in words."""


class WorkerError(Part):
    """Report: why the worker ends."""

    kind: Literal["error", "lost"]
    """`error`: an error of this worker. `lost`: the worker lost another rank or the network, a later generation has
    begun, or the checkpoint or the state in memory that the worker starts from cannot be used."""
    sentence: Sentence
    """One line for the user: which rank did what, and kind, message and place of the error."""
    fault: Name
    """Name of the error's row in the fault table."""
    details: ErrorDetails


Order = StartOrder | StopOrder | ChangePlanOrder
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
