"""The files on which agents agree: the records of generations, and the journal of the witness. Each file can be created
only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from hpctrain.agent.worker_messages import ChangePlanOrder, MemoryOrder
from hpctrain.base.atomic import create_json, storage_errors
from hpctrain.base.errors import FileError, HpctrainError, StorageError
from hpctrain.records.format.document import Document
from hpctrain.records.history.generation import Generation, Member, record_file
from hpctrain.records.history.memory_state import HeldState
from hpctrain.records.history.witness import WitnessEntry, witness_file
from hpctrain.records.plan.plan import Plan

DocumentKind = TypeVar("DocumentKind", bound=Document)


class GenerationStore:
    """The generations that the agents of a run have agreed on, as files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> Generation | None:
        """Return the newest published record; None if none is published.

        Raises:
            StorageError: the run folder cannot be read.
            FileError, UntrustedError: the newest record has errors or is untrusted.
        """
        files = sorted(self.list_records())
        return self.read(files[-1], Generation) if files else None

    def decide(self, record: Generation) -> Generation:
        """Publish `record` as the generation with its number, unless another agent was first. Return the record that
        was published first. The agents of an attempt agree on their first generation in this way, because there are no
        members before it.

        Raises:
            StorageError: the run folder cannot be read or written.
            FileError, UntrustedError: the record that was published first has errors or is untrusted.
        """
        path = record_file(self._folder, record.number)
        return record if self.create(path, record) else self._existing(path, Generation)

    def publish(self, record: Generation) -> None:
        """Publish a record that the agents have agreed on, unless another agent has done it.

        Raises:
            StorageError: the run folder cannot be read or written.
            FileError, UntrustedError: the record with this number has errors or is untrusted.
            HpctrainError: another record with this number is published.
        """
        path = record_file(self._folder, record.number)
        published = self.read(path, Generation)
        if published is None:
            published = self.decide(record)
        if published != record:
            raise HpctrainError(f"{path}: is not the record that the agents agreed on: {published.proposer} made it")

    def entry(self, number: int, place: int) -> WitnessEntry | None:
        """Return the entry at `place`, from 0, of the witness's journal about generation `number`; None if the journal
        is shorter.

        Raises:
            StorageError: the run folder cannot be read.
            FileError, UntrustedError: the entry has errors or is untrusted.
        """
        return self.read(witness_file(self._folder, number, place), WitnessEntry)

    def append(self, number: int, place: int, entry: WitnessEntry) -> bool:
        """Create the entry at `place`, from 0, of the witness's journal about generation `number`. Return False if
        there is an entry at this place already.

        Raises:
            StorageError: the run folder cannot be written, or the entry at this place cannot be read.
            FileError, UntrustedError: the entry at this place has errors or is untrusted.
        """
        path = witness_file(self._folder, number, place)
        created = self.create(path, entry)
        if not created:
            self._existing(path, WitnessEntry)
        return created

    def list_records(self) -> list[Path]:
        """Return the paths of all published records, in no order.

        Raises:
            StorageError: the run folder cannot be read.
        """
        try:
            return list(self._folder.glob("gen-*.json"))
        except OSError as error:
            raise _unreadable(self._folder, error) from error

    def read(self, path: Path, kind: type[DocumentKind]) -> DocumentKind | None:
        """Return the document in a file; None if there is no such file.

        Raises:
            StorageError: the file cannot be read.
            FileError, UntrustedError: the file has errors; or it or its folder belongs to another user, or others can
                write to one of them.
        """
        try:
            return kind.read(path, owned=True)
        except FileError as error:
            cause = error.__cause__
            if isinstance(cause, FileNotFoundError):
                return None
            if isinstance(cause, OSError):
                raise _unreadable(path, cause) from error
            raise

    def create(self, path: Path, document: Document) -> bool:
        """Create a file with its whole content, on disk when this returns. Return False if it exists already.

        Raises:
            StorageError: the run folder cannot be written.
        """
        with storage_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
        return create_json(path, document.to_json())

    def _existing(self, path: Path, kind: type[DocumentKind]) -> DocumentKind:
        document = self.read(path, kind)
        if document is None:
            raise StorageError(f"{path}: exists, and cannot be read; generations are removed only with their run")
        return document


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: cannot read: {error.strerror or error}; the run folder may be on a file system that fails"
    )


@dataclass(frozen=True)
class Proposal:
    """What the agent that proposes knows about the next generation before it makes the record."""

    number: int
    """Number of the next generation."""
    attempt: int
    """Number of the attempt."""
    members: tuple[Member, ...]
    """Members of the next generation."""
    previous: Generation | None
    """The generation before, maybe of an earlier attempt; None: the newest in the run folder, if there is one."""
    reason: str
    """Why a new generation begins."""
    proposer: str
    """Incarnation of the agent that proposes."""
    held: Mapping[str, Sequence[HeldState]] = field(default_factory=dict)
    """Node of a member -> the parts of training states in its memory, each of one rank."""


@dataclass(frozen=True)
class ProposedGeneration:
    """A generation's record that the agents have not agreed on yet."""

    record: Generation
    plan: Plan
    """The plan that the generation runs."""
    announce: Callable[[], None]
    """Writes the events about the plan and the checkpoint. Called once if the agents agree on this record, and not for
    a losing proposal."""
    save_plan: Callable[[], None] = lambda: None
    """Writes a new plan to the run folder: `plan.json` or `plan-<generation>.json`, a copy that users may edit. Called
    once after `announce`, in another thread, because the file system may hang."""


class StateKeeper(Protocol):
    """The memory of a node in which the state of its workers outlives them."""

    def orders(self, record: Generation, plan: Plan, ranks: Sequence[int]) -> Mapping[int, MemoryOrder]:
        """Return rank -> the memory for its worker, for the ranks of a new generation on this node."""

    def ready(self, rank: int) -> None:
        """Note that the worker of `rank` has loaded its state."""

    def held(self) -> tuple[HeldState, ...]:
        """Return the parts of states that the memory holds, each of one rank. Call it only when no worker of the node
        runs."""

    def close(self) -> None:
        """Give the memory up."""


class GenerationSource(Protocol):
    """Makes the record of a generation from plans and checkpoints in the run folder."""

    def make(self, proposal: Proposal) -> ProposedGeneration:
        """Return the next generation's record, its plan, and the functions to call once the agents agree on the record.
        An error means that this agent cannot propose the generation."""

    def plan_of(self, record: Generation) -> Plan:
        """Return the plan that a generation runs."""

    def skip_checkpoint(self, record: Generation, reason: str) -> None:
        """Rename the checkpoint that a generation starts from, so that no later one does, and write an event. If that
        is done already, do nothing.

        Args:
            reason: what a worker found to be wrong, beginning with the checkpoint's name.
        """


class PlanAdviser(Protocol):
    """Says when another plan is worth a new generation."""

    def advise(self, record: Generation, step: int) -> ChangePlanOrder | None:
        """Return the order to end a generation for another plan, once that plan is where `GenerationSource.make` finds
        it; None if the generation is to go on. The call may take long, and an error of it changes nothing.

        Args:
            record: the generation that trains.
            step: a step that it has done.
        """
