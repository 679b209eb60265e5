"""One agent's part in the agreement on the next generation: it votes if it is a member of the last one, and it may
propose. `agent/consensus.py` has the rules; this module sends the messages, repeats them, and asks the witness.

Nothing here reads the clock or blocks: the agent calls it in each turn of its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from hpctrain.agent.agreement_messages import (
    MAX_HELD,
    REASON_CHARS,
    Accepted,
    AcceptRequest,
    AgreementMessage,
    Decided,
    PastVote,
    Prepare,
    Promise,
    Refusal,
)
from hpctrain.agent.consensus import WITNESS, AcceptorState, Ballot, Electorate, Proposer, Vote
from hpctrain.agent.generation_store import ProposedGeneration
from hpctrain.agent.witness import Journal, Witness
from hpctrain.base.errors import StorageError
from hpctrain.base.helper_thread import Background
from hpctrain.records.history.generation import Generation, Member
from hpctrain.records.history.memory_state import HeldState

PROMISES_S = 5.0
"""Longest time, in seconds, for which a proposer waits for the promises of all living members, before it goes on with a
quorum of them. A member promises when its workers have ended, which takes seconds on some systems. A member without a
promise is left out of the next generation, and the fewer members a generation has, the fewer losses it survives."""
VOTES_S = 1.0
"""Seconds for which a proposer waits for the votes of all living members, before it asks the witness."""
RESEND_S = 0.5
"""Seconds after which a request without an answer is sent again: a connection may have closed."""
BACKOFF_S = 0.1
"""Seconds from an agent's first refusal to its next ballot, times the place of its node among the sorted names of the
acceptors' nodes, from 1. After each further refusal the agent waits twice as long, up to `BACKOFF_MAX` times as long.
So proposers soon leave each other the time that a ballot takes."""
BACKOFF_MAX = 10
"""Longest wait after a refusal, as a multiple of the first."""
BACKOFF_MAX_TRIES = 20
"""A ballot that fails because a file cannot be read or written counts as refused. After so many refusals, such a
failure is an error."""


class MessageRoutes(Protocol):
    """The ways to the other agents."""

    def send(self, nodes: Collection[str], message: AgreementMessage) -> None:
        """Send a message to the agents of some nodes. For those that cannot be reached, it is lost."""

    def is_near(self, node: str) -> bool:
        """Return whether this agent keeps a connection to the agent of a node."""


HeldByNode = Mapping[str, Sequence[HeldState]]
"""Node -> the parts of training states in its memory, each of one rank."""
Make = Callable[[tuple[Member, ...], HeldByNode], "Future[ProposedGeneration]"]
"""A function that begins to make the record of a generation. Arguments: the members, and the parts of states in the
memory of their nodes."""
_WitnessAnswer = tuple[bool, AcceptorState[Generation]]


class Agreement:
    """The agreement on the generation after the one that this agent is in."""

    def __init__(
        self,
        me: Member,
        attempt: int,
        routes: MessageRoutes,
        journal: Journal,
        in_background: Background,
        end_generation: Callable[[str], bool],
        held: Callable[[], Sequence[HeldState]],
    ) -> None:
        """Prepare to take part.

        Args:
            me: this agent; its address does not matter.
            journal: the files of the witness.
            in_background: begins the calls that use files.
            end_generation: ends this node's part of the running generation; its argument is the reason. It is called
                before each promise and vote, and returns whether no worker runs any more. If it returns false, this
                agent does not answer; the proposer asks again.
            held: returns the parts of training states in this node's memory. It is called for each promise.
        """
        self._me = me
        self._attempt = attempt
        self._routes = routes
        self._journal = journal
        self._in_background = in_background
        self._end_generation = end_generation
        self._held = held
        self._record: Generation | None = None
        self.decided: Generation | None = None
        """The newest record that the agents have agreed on and that this agent has not entered."""
        self.decided_here = False
        """Whether a ballot of this agent decided the record in `decided`; then perhaps no other agent knows the
        record."""
        # Node -> when it got the present record from here. Only nodes of the job send messages.
        self._informed: dict[str, float] = {}
        self._entered = float("-inf")
        self._reset(0, {})

    def enter(self, now: float, record: Generation) -> None:
        """Begin, at `now` seconds of the agent's clock, the agreement on the generation after `record`, which the
        agents have agreed on."""
        self._record = record
        # The agent whose ballot decided `record` has sent it to all others.
        self._informed.clear()
        self._entered = now
        self._reset(record.number + 1, {member.node: member.incarnation for member in record.members})
        if self.decided is not None and self.decided.number <= record.number:
            self.decided, self.decided_here = None, False

    def _reset(self, number: int, acceptors: dict[str, str]) -> None:
        """Begin the agreement on generation `number`, without promises, votes and proposals.

        Args:
            acceptors: node -> incarnation of the agent that votes.
        """
        self._acceptors = acceptors
        self._electorate = Electorate(frozenset(acceptors.values()))
        self._state: AcceptorState[Generation] = AcceptorState()
        self._witness = Witness(self._journal, number)
        self._witness_call: tuple[Ballot, bool, Future[_WitnessAnswer]] | None = None
        self._proposer: Proposer[Generation] | None = None
        self._making: Future[ProposedGeneration] | None = None
        # Incarnation -> what the agent held when it promised. It holds the same until it enters a generation.
        self._promised_state: dict[str, Sequence[HeldState]] = {}
        self._round = self._refusals = 0
        self._refused = False
        self._since = self._asked = self._retry_at = float("-inf")

    def receive(self, now: float, node: str, message: AgreementMessage) -> None:
        """Process a message from the agent of `node`, and answer it.

        Args:
            now: seconds of the agent's clock.
        """
        if isinstance(message, Decided):
            self._note_decided(message.record)
        elif self._record is not None and isinstance(message, Prepare | AcceptRequest):
            self._answer(now, node, message)
        elif self._proposer is not None and isinstance(message, Promise | Accepted | Refusal):
            self._note(now, node, message, self._proposer)

    def inform(self, now: float, node: str) -> None:
        """Send the record of this agent's generation to the agent of `node`, which is in an older generation. Do
        nothing if the record was sent to it, or this agent entered the generation, in the last `RESEND_S` seconds, or
        if in a tree the two agents have no connection: then the node's neighbours inform it.

        Args:
            now: seconds of the agent's clock.
        """
        due = now - self._informed.get(node, self._entered) >= RESEND_S
        # In a tree, its neighbours inform it.
        if self._record is not None and due and self._routes.is_near(node):
            self._informed[node] = now
            self._routes.send((node,), Decided(record=self._record))

    def _take_witness_answer(self, now: float) -> None:
        """Take the answer of the witness, if there is one."""
        if self._witness_call is None or not self._witness_call[2].done():
            return
        (ballot, voting, call), self._witness_call = self._witness_call, None
        try:
            granted, state = call.result()
        except StorageError as error:
            self._note_failure(now, error)
            return
        if self._proposer is None or self._proposer.ballot != ballot:
            return
        if not granted:
            self._note_refusal(now, state.promised.round)
        elif voting:
            self._note_vote(WITNESS, self._proposer)
        else:
            self._proposer.note_promise(WITNESS, state.vote)

    def propose(self, now: float, members: Sequence[Member], reason: str, make: Make) -> None:
        """Go on proposing a record. To be called in each turn in which this agent should propose, until `decided` is
        set.

        Args:
            now: seconds of the agent's clock.
            members: the agents that can be members of the next generation.
            reason: why the last generation ended.
            make: begins to make the record. It gets `members` without the acceptors that have not promised, and the
                parts of training states that the agents in question hold. It is called again if a file could not be
                read or written, or if one of these agents is no longer in `members` when the record is made.

        Raises:
            HpctrainError: no record can be made, an entry of the witness's journal has errors or is untrusted, or the
                run folder cannot be read or written after `BACKOFF_MAX_TRIES` refusals.
        """
        self._take_witness_answer(now)
        if self._proposer is None or (self._refused and now >= self._retry_at):
            self._begin(now, reason)
        proposer = self._proposer
        assert proposer is not None, "a ballot has begun"
        if now - self._asked >= RESEND_S:
            self._ask(now, reason, proposer)
        if self._refused or self.decided is not None:
            return
        if proposer.value is None:
            self._bring_value(now, members, make, proposer)
        elif WITNESS in proposer.promises or now - self._since >= VOTES_S:
            self._let_witness_vote(proposer)

    def _begin(self, now: float, reason: str) -> None:
        """Begin a ballot that is higher than every ballot that this agent knows."""
        self._round = max(self._round, self._state.promised.round) + 1
        self._proposer = Proposer(Ballot(self._round, self._me.incarnation), self._electorate)
        self._refused = False
        self._since = now
        self._ask(now, reason, self._proposer)

    def _ask(self, now: float, reason: str, proposer: Proposer[Generation]) -> None:
        """Send the request of the ballot's present phase to all acceptors that have not answered it."""
        self._asked = now
        about: dict[str, Any] = {
            "number": self._number + 1,
            "round": proposer.ballot.round,
            "proposer": proposer.ballot.proposer,
        }
        request: Prepare | AcceptRequest
        if proposer.value is None:
            request = Prepare(**about, reason=reason[:REASON_CHARS])
        else:
            request = AcceptRequest(**about, record=proposer.value)
        answered = proposer.promises if proposer.value is None else proposer.accepted_by
        silent = [node for node, incarnation in self._acceptors.items() if incarnation not in answered]
        self._routes.send([node for node in silent if node != self._me.node], request)
        if self._is_acceptor and self._me.incarnation not in answered:
            self._answer(now, self._me.node, request)

    def _bring_value(self, now: float, members: Sequence[Member], make: Make, proposer: Proposer[Generation]) -> None:
        """Propose a value as soon as a quorum has promised the ballot and the value is known."""
        promised = proposer.promises
        voters = [member for member in members if member.incarnation in self._electorate.members]
        everybody = all(member.incarnation in promised for member in voters)
        if not everybody and now - self._since < PROMISES_S:
            return
        if proposer.is_prepared and (bound := proposer.bound_value()) is not None:
            self._put_to_vote(now, bound, proposer)
            return
        if not self._electorate.is_quorum({*promised, WITNESS}):
            return
        if self._making is None:
            absent = {member.incarnation for member in voters} - promised.keys()
            fit = tuple(member for member in members if member.incarnation not in absent)
            held = {member.node: self._promised_state.get(member.incarnation, ()) for member in fit}
            self._making = make(fit, held)
        if not self._making.done():
            return
        try:
            record = self._making.result().record
        except StorageError as error:
            self._making = None
            self._note_failure(now, error)
            return
        if not set(record.members) <= set(members):
            self._making = None  # a member is gone meanwhile
        elif proposer.is_prepared:
            self._put_to_vote(now, record, proposer)
        elif self._witness_call is None:
            # Last, because the witness may promise another ballot while a record is made.
            ballot = proposer.ballot
            self._witness_call = ballot, False, self._in_background(self._witness.prepare, ballot)

    def _put_to_vote(self, now: float, record: Generation, proposer: Proposer[Generation]) -> None:
        proposer.propose(record)
        self._since = now
        self._ask(now, record.reason, proposer)
        if WITNESS in proposer.promises:
            self._let_witness_vote(proposer)

    def _let_witness_vote(self, proposer: Proposer[Generation]) -> None:
        """Ask the witness for its vote, if this vote completes a quorum."""
        if self._witness_call is not None or self._refused or self.decided is not None or proposer.value is None:
            return
        if self._electorate.is_quorum({*proposer.accepted_by, WITNESS}):
            vote = Vote(proposer.ballot, proposer.value)
            self._witness_call = proposer.ballot, True, self._in_background(self._witness.accept, vote)

    def _answer(self, now: float, node: str, message: Prepare | AcceptRequest) -> None:
        """Answer a proposer as an acceptor."""
        if message.number <= self._number:
            self.inform(now, node)
            return
        # A request about a later generation comes again when this agent has been informed of the generations between.
        if message.number != self._number + 1 or not self._is_acceptor:
            return
        about: dict[str, Any] = {"number": message.number, "round": message.round, "proposer": message.proposer}
        if not self._state.allows(message.ballot):
            self._reply(now, node, Refusal(**about, promised_round=self._state.promised.round))
            return
        if not self._end_generation(message.reason if isinstance(message, Prepare) else message.record.reason):
            return  # the request comes again
        if isinstance(message, AcceptRequest):
            self._state = self._state.after_accept(Vote(message.ballot, message.record))
            self._reply(now, node, Accepted(**about, incarnation=self._me.incarnation))
            return
        self._state = self._state.after_prepare(message.ballot)
        vote, past = self._state.vote, None
        if vote is not None:
            past = PastVote(round=vote.ballot.round, proposer=vote.ballot.proposer, record=vote.value)
        held = tuple(self._held())
        if len(held) > MAX_HELD:
            print(f"hpctrain agent: {len(held)} parts of states are not used; allowed: {MAX_HELD} a node", flush=True)
            held = ()
        self._reply(now, node, Promise(**about, incarnation=self._me.incarnation, vote=past, held=held))

    def _reply(self, now: float, node: str, message: Promise | Accepted | Refusal) -> None:
        if node != self._me.node:
            self._routes.send((node,), message)
        elif self._proposer is not None:
            self._note(now, node, message, self._proposer)

    def _note(
        self, now: float, node: str, message: Promise | Accepted | Refusal, proposer: Proposer[Generation]
    ) -> None:
        """Take the answer of an acceptor to this agent's ballot."""
        if message.number != self._number + 1 or message.ballot != proposer.ballot:
            return
        if isinstance(message, Refusal):
            self._note_refusal(now, message.promised_round)
        elif self._acceptors.get(node) != message.incarnation:
            return  # an agent that has restarted has no vote
        elif isinstance(message, Promise):
            self._promised_state[message.incarnation] = message.held
            proposer.note_promise(message.incarnation, None if message.vote is None else message.vote.vote)
        elif proposer.value is not None:
            self._note_vote(message.incarnation, proposer)

    def _note_vote(self, acceptor: str, proposer: Proposer[Generation]) -> None:
        proposer.note_accepted(acceptor)
        if proposer.is_decided and self.decided is None and proposer.value is not None:
            self.decided, self.decided_here = proposer.value, True

    def _note_refusal(self, now: float, promised_round: int) -> None:
        self._round = max(self._round, promised_round)
        if not self._refused:
            self._refused = True
            self._refusals = min(self._refusals + 1, BACKOFF_MAX_TRIES)
            nodes = sorted(self._acceptors)
            turn = nodes.index(self._me.node) if self._me.node in nodes else len(nodes)
            self._retry_at = now + BACKOFF_S * min(2 ** (self._refusals - 1), BACKOFF_MAX) * (1 + turn)

    def _note_failure(self, now: float, error: StorageError) -> None:
        """Try again in a higher ballot, because the file system may come back; after `BACKOFF_MAX_TRIES` refusals and
        failures, raise `error`. It does not matter whether the call that failed had an effect."""
        if self._refusals >= BACKOFF_MAX_TRIES:
            raise error
        print(f"hpctrain agent: generation {self._number + 1} is not agreed on yet: {error}", flush=True)
        self._note_refusal(now, 0)

    def _note_decided(self, record: Generation) -> None:
        known = self._number if self.decided is None else self.decided.number
        if record.attempt == self._attempt and record.number > known:
            self.decided, self.decided_here = record, False

    @property
    def _number(self) -> int:
        return -1 if self._record is None else self._record.number

    @property
    def _is_acceptor(self) -> bool:
        return self._acceptors.get(self._me.node) == self._me.incarnation
