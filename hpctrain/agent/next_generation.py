"""One agent's part in the next generation: it makes the record, agrees on it with the other agents, publishes it and
sends it to them. It also asks whether another plan is worth a new generation (`PlanAdvice`)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from hpctrain.agent.agreement import Agreement, HeldByNode, Make, MessageRoutes
from hpctrain.agent.agreement_messages import AgreementMessage, Decided
from hpctrain.agent.decide import Decision
from hpctrain.agent.event_log import EventLog, note_members, note_start
from hpctrain.agent.generation_store import (
    GenerationSource,
    GenerationStore,
    PlanAdviser,
    Proposal,
    ProposedGeneration,
    StateKeeper,
)
from hpctrain.agent.publication import PATIENCE_S, Publication
from hpctrain.agent.view import PeerView
from hpctrain.agent.worker_messages import ChangePlanOrder
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError, StorageError, Superseded
from hpctrain.base.helper_thread import Background, HelperThread
from hpctrain.records.history.generation import Generation, Member
from hpctrain.records.history.memory_state import HeldState
from hpctrain.records.plan.plan import Plan

LOOK_S = 0.5
"""Seconds between two looks at the published records while this agent is in no generation."""
LOOK_STEPS = 5
"""Fewest steps between two questions to the adviser."""


@dataclass(frozen=True)
class AgentIdentity:
    """Who this agent is: node, address, incarnation, attempt and run folder."""

    node: str
    nodes: tuple[str, ...]
    """All nodes of the allocation, in order."""
    addr: str
    """Address at which other nodes reach this node."""
    incarnation: str
    attempt: int
    folder: Path


@dataclass(frozen=True)
class AgentContext:
    """What an agent gets from its process: log of events, clock, threads, memory for its workers, functions to call."""

    event_log: EventLog
    clock: Clock
    stop_wanted: Callable[[], str | None]
    """Returns who asked this node to save and stop; None if nobody did."""
    making: Executor = field(default_factory=lambda: HelperThread("proposal"))
    """The thread that makes records. The search for a plan may take longer than the heartbeat timeout."""
    files: Executor = field(default_factory=lambda: HelperThread("files"))
    """The thread that reads and writes all other files, because a file system may hang: those of the agreement, plans,
    addresses and the workers' logs. Events have a thread of their own (`EventLog.in_background`)."""
    listen: Callable[[str], socket.socket] = lambda addr: socket.create_server((addr, 0))
    """Opens a listening socket for the store of a generation."""
    memory: StateKeeper | None = None
    """The memory for the state of this node's workers; None: their state ends with them."""
    peer_lost: Callable[[str], None] | None = None
    """Called in the thread `files` with each node whose agent was lost before the end of its part in the attempt."""
    adviser: PlanAdviser | None = None
    """Says, in a thread of its own, when another plan is worth a new generation; None: no generation ends for another
    plan."""


class MessagePeers(MessageRoutes, Protocol):
    """The connections to the other agents, as far as the agreement needs them (`PeerMesh`)."""

    def views(self) -> tuple[PeerView, ...]:
        """Return the other agents as last seen."""

    def take_messages(self) -> list[tuple[str, AgreementMessage]]:
        """Return (node of the sender, message) of each message of the agreement since the last call."""

    def wake(self) -> None:
        """Let the agent's loop take its next turn at once. Any thread may call this."""


class ProposalFailure(Exception):  # noqa: N818 - a result, which the agent turns into its decision to fail
    """No generation can be made, or no agreement can be reached; `decision` is the decision to fail."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


class NextGeneration:
    """The agreement on the generation after the one that this agent is in, and the making, the publication and the
    events of its record."""

    def __init__(
        self,
        place: AgentIdentity,
        peers: MessagePeers,
        source: GenerationSource,
        store: GenerationStore,
        event_log: EventLog,
        threads: tuple[Background, Background],
        end_generation: Callable[[str], bool],
        held: Callable[[], Sequence[HeldState]],
    ) -> None:
        """Prepare to take part.

        Args:
            threads: one makes records, the other reads and writes the files of the agreement. The first may be busy for
                long, because it searches for plans. The agent's loop wakes when a call is done.
            end_generation: ends this node's part of the running generation; its argument is the reason. Returns whether
                no worker runs any more.
            held: returns the parts of training states in this node's memory, once the generation has ended.
        """
        self._place = place
        self._peers = peers
        self._source = source
        self._store = store
        self._event_log = event_log
        self._in_making, self._in_files = threads
        me = Member(node=place.node, incarnation=place.incarnation, addr=place.addr, store_port=0)
        self._agreement = Agreement(me, place.attempt, peers, store, self._in_files, end_generation, held)
        self._publication = Publication(store, self._in_files)
        self._record: Generation | None = None
        self.first_number = 0
        """Number of the attempt's first generation."""
        self._making: tuple[Future[ProposedGeneration], Decision] | None = None
        self._first: Future[Generation] | None = None
        self._look: Future[Generation | None] | None = None
        self._next_look = float("-inf")
        self._decided_at: float | None = None
        self._notes_start = False
        self._saving: Future[None] | None = None

    @property
    def number(self) -> int:
        """Number of the generation that this agent is in, or was in last. Before this agent is in one: the number of
        the attempt's first generation, minus 1."""
        return self._record.number if self._record else self.first_number - 1

    def open(self) -> None:
        """Find the number of the attempt's first generation. Generation numbers continue over attempts.

        Raises:
            StorageError: the run folder cannot be read.
            FileError, UntrustedError: the newest record has errors or is untrusted.
        """
        last = self._store.newest()
        # A generation that this attempt decided before this agent joined is entered as a spectator; the next
        # generation includes the agent.
        self.first_number = 0 if last is None else last.number + (last.attempt != self._place.attempt)

    def receive(self, now: float) -> None:
        """Process the messages of other agents, and inform those that are in an older generation.

        Args:
            now: seconds of the agent's clock.
        """
        for node, message in self._peers.take_messages():
            self._agreement.receive(now, node, message)
        for view in self._peers.views():
            if view.connected and view.generation < self.number:
                self._agreement.inform(now, view.node)

    def publish(self, now: float) -> bool:
        """Go on publishing the records that this agent knows, and the copy of a plan that it made. Return whether all
        are published.

        Raises:
            StorageError: a copy of a new plan cannot be written.
            HpctrainError: the run folder has another record of a generation than the agents agreed on, or its record is
                untrusted.
        """
        self._publication.poll(now)
        if self._saving is not None and self._saving.done():
            saving, self._saving = self._saving, None
            saving.result()
        return self._publication.is_done and self._saving is None

    def decided(self, now: float, between: bool) -> Generation | None:
        """Return a generation that the agents agreed on and that this agent has to enter now; None if there is none.

        A record that this agent decided is published before this agent sends it to the others, so that workers of the
        last generation that wake late write nothing any more. If the file system hangs, the record is sent after
        `PATIENCE_S`, published or not.

        Args:
            now: seconds of the agent's clock.
            between: whether this agent is in no generation.

        Raises:
            HpctrainError: as of `publish`.
        """
        record = self._agreement.decided or (self._published_elsewhere(now) if between else None)
        if record is None or record.number < self.first_number:
            return None
        if self._agreement.decided_here:
            if self._decided_at is None:
                self._decided_at = now
                self._publication.begin(now, record, at_once=True)
            if not self._publication.is_done and now - self._decided_at < PATIENCE_S:
                return None
            self._inform_all(record)
        return record

    def propose(self, now: float, decision: Decision, members: tuple[Member, ...]) -> None:
        """Go on proposing the next generation; to be called in each turn in which `decision` is to propose.

        Args:
            now: seconds of the agent's clock.
            members: the agents of the nodes that `decision` names.

        Raises:
            ProposalFailure: no record can be made, the run folder cannot be read or written, or a later attempt has
                begun.
        """

        def make(fit: tuple[Member, ...], held: HeldByNode) -> Future[ProposedGeneration]:
            proposal = Proposal(
                number=self.number + 1,
                attempt=self._place.attempt,
                members=fit,
                previous=self._record,
                reason=decision.reason,
                proposer=self._place.incarnation,
                held=held,
            )
            making = self._in_making(self._make, proposal)
            self._making = making, decision
            return making

        if self._agreement.decided is not None:
            return  # it is being published
        try:
            if self._record is None:
                self._propose_first(members, make)
            else:
                self._agreement.propose(now, members, decision.reason, make)
            if self._agreement.decided is not None:
                self._peers.wake()
        except HpctrainError as error:
            # No plan for the remaining nodes, or no disk space to write it: no other agent would succeed.
            made_for = decision if self._making is None else self._making[1]
            failure = replace(made_for, act="fail", reason=str(error), exit_code=error.exit_code)
            raise ProposalFailure(failure) from error

    def enter(self, now: float, record: Generation, last_step: int) -> Plan | None:
        """Write the events of a generation that begins, and prepare the agreement on the one after it. Return the
        generation's plan if this agent made it; else None.

        Args:
            now: seconds of the agent's clock.
            last_step: the newest step that this node's workers have reported; 0 if none.

        Raises:
            HpctrainError: as of `publish`.
        """
        plan = self._announce(record, last_step)
        if not self._agreement.decided_here and self._record is not None:
            self._publication.begin(now, record, at_once=False)
        self._agreement.enter(now, record)
        self._record = record
        self._making = self._first = self._decided_at = None
        return plan

    def note_start(self, record: Generation, plan: Plan, last_step: int) -> None:
        """Write the event `generation_started`, if that is this agent's part and not done yet.

        Args:
            last_step: the newest step that this node's workers have reported; 0 if none.
        """
        if self._notes_start:
            self._notes_start = False
            note_start(self._event_log, record, plan, last_step)

    def _make(self, proposal: Proposal) -> ProposedGeneration:
        previous = proposal.previous or self._store.newest()
        try:
            return self._source.make(replace(proposal, previous=previous))
        except OSError as error:
            where = error.filename or self._place.folder
            raise StorageError(
                f"{where}: {error.strerror or error}, so generation {proposal.number} cannot be made"
            ) from error

    def _propose_first(self, members: tuple[Member, ...], make: Make) -> None:
        """Go on proposing the attempt's first generation: nobody is a member yet, so the first published record is the
        one that counts."""
        making = make(members, {}) if self._making is None else self._making[0]
        if self._first is None and making.done():
            self._first = self._in_files(self._store.decide, making.result().record)
        if self._first is not None and self._first.done():
            record = self._first.result()
            if record.attempt > self._place.attempt:
                raise Superseded(f"attempt {record.attempt} has begun")
            if record.attempt < self._place.attempt:
                # Agents of an earlier attempt went on, cut off from Slurm, after this agent had looked.
                self.first_number, self._making, self._first = record.number + 1, None, None
                return
            self._agreement.receive(0.0, self._place.node, Decided(record=record))
            self._inform_all(record)

    def _published_elsewhere(self, now: float) -> Generation | None:
        """Return a published generation of this attempt that this agent has not entered; None if it knows none. Agents
        send records to each other, so only an agent that no other agent reaches needs the files."""
        if self._look is None and now >= self._next_look:
            self._next_look = now + LOOK_S
            self._look = self._in_files(self._store.newest)
        if self._look is None or not self._look.done():
            return None
        look, self._look = self._look, None
        try:
            newest = look.result()
        except HpctrainError as error:
            print(f"hpctrain agent: the published generations cannot be read: {error}", flush=True)
            return None
        if newest is None or newest.number <= self.number or newest.attempt != self._place.attempt:
            return None
        return newest

    def _announce(self, record: Generation, last_step: int) -> Plan | None:
        """Write the events of a generation, if this agent made its record, or decided it in place of an agent that is
        gone. In the latter case, `note_start` writes the last of them when the plan is known. Return the plan that this
        agent made, if it made this record."""
        self._notes_start = False
        making, decision = self._making or (None, None)
        nodes, peers = self._place.nodes, self._peers.views()
        if making is not None and decision is not None and making.done() and not making.exception():
            proposed = making.result()
            if proposed.record == record:
                note_members(self._event_log, record, self._record, nodes, peers, decision.left_out)
                proposed.announce()
                self._saving = self._in_making(proposed.save_plan)
                self._notes_start = True
                self.note_start(record, proposed.plan, last_step)
                return proposed.plan
        maker_lives = any(view.connected and view.incarnation == record.proposer for view in peers)
        if self._agreement.decided_here and not maker_lives:
            note_members(self._event_log, record, self._record, nodes, peers, {})
            self._notes_start = True
        return None

    def _inform_all(self, record: Generation) -> None:
        self._peers.send([view.node for view in self._peers.views()], Decided(record=record))


class PlanAdvice:
    """The questions of one agent to its adviser."""

    def __init__(self, ask: Callable[[Generation, int], Future[ChangePlanOrder | None]] | None) -> None:
        """Prepare to ask.

        Args:
            ask: begins a call of `PlanAdviser.advise`; None: this agent never asks.
        """
        self._ask = ask
        self._call: Future[ChangePlanOrder | None] | None = None
        self._next_step = 0
        self._ordered = False
        self._error = ""

    def forget(self) -> None:
        """Forget what the adviser says about a generation that is over."""
        self._call, self._next_step, self._ordered = None, 0, False

    def note_step(self, record: Generation, step: int) -> None:
        """Ask the adviser about a generation whose rank 0 has done `step`, unless it was asked a short time ago or its
        answer is awaited."""
        if self._ask is None or self._ordered or self._call is not None or step < self._next_step:
            return
        self._next_step = step + LOOK_STEPS
        self._call = self._ask(record, step)

    def order(self) -> ChangePlanOrder | None:
        """Return the adviser's order, once; None before it comes, and afterwards."""
        if self._call is None or not self._call.done():
            return None
        call, self._call = self._call, None
        if (error := call.exception()) is not None:
            text = f"hpctrain agent: no other plan was considered: {type(error).__name__}: {error}"
            if text != self._error:
                print(text, flush=True)
            self._error = text
            return None
        order = call.result()
        self._ordered = order is not None
        return order
