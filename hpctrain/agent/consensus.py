"""Decides one value among acceptors of which some fail: single-decree Paxos (Lamport 2001), without clock, network or
files.

A proposer asks acceptors to promise a ballot. With the promises of a quorum, it asks them to accept a value in this
ballot: the value of the vote with the highest ballot among the promises, or any value if there is no vote. A value that
a quorum has accepted in one ballot is decided. Any two quorums have an acceptor in common, so no other value is ever
decided, however messages are lost, repeated, delayed or reordered.

An acceptor must never forget its promise and its vote. Agents keep both in memory only: an agent that restarts has
another incarnation, and is no acceptor.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

WITNESS = "witness"
"""Name of the acceptor that is no process: a journal in the run folder (`agent/witness.py`)."""

V = TypeVar("V")


class Ballot(NamedTuple):
    """One attempt of one proposer to decide a value. Ballots are ordered by round, then by proposer."""

    round: int
    """From 1. A proposer whose ballot was refused takes a higher round."""
    proposer: str
    """Incarnation of the proposing agent, so that no two proposers ever use the same ballot."""


NO_BALLOT = Ballot(0, "")
"""Lower than every ballot of a proposer."""


@dataclass(frozen=True)
class Vote(Generic[V]):
    """A value that an acceptor has accepted, with the ballot in which it accepted it."""

    ballot: Ballot
    value: V


@dataclass(frozen=True)
class AcceptorState(Generic[V]):
    """All that an acceptor remembers."""

    promised: Ballot = NO_BALLOT
    """The highest ballot that the acceptor has promised or accepted; it refuses lower ones."""
    vote: Vote[V] | None = None
    """The acceptor's last vote; None before the first one."""

    def allows(self, ballot: Ballot) -> bool:
        """Return whether the acceptor may promise `ballot`, or accept a value in it."""
        return ballot >= self.promised

    def after_prepare(self, ballot: Ballot) -> AcceptorState[V]:
        """Return the state after the promise of a ballot that the acceptor allows."""
        assert self.allows(ballot), f"{ballot} is lower than {self.promised}"
        return replace(self, promised=ballot)

    def after_accept(self, vote: Vote[V]) -> AcceptorState[V]:
        """Return the state after a vote in a ballot that the acceptor allows."""
        assert self.allows(vote.ballot), f"{vote.ballot} is lower than {self.promised}"
        return AcceptorState(vote.ballot, vote)


@dataclass(frozen=True)
class Electorate:
    """The acceptors of one decision."""

    members: frozenset[str]
    """Incarnations of the agents that are acceptors."""

    @property
    def has_witness(self) -> bool:
        """Whether the witness is an acceptor, too. It is one if the number of members is even: exactly half of them and
        the witness are then a quorum."""
        return len(self.members) % 2 == 0

    def is_quorum(self, acceptors: Collection[str]) -> bool:
        """Return whether `acceptors` have more than half of the members, or exactly half of them and the witness. Names
        in `acceptors` that are no acceptors do not count."""
        allowed = self.members | {WITNESS} if self.has_witness else self.members
        return 2 * len(allowed & set(acceptors)) > len(allowed)


@dataclass
class Proposer(Generic[V]):
    """One ballot of one proposer: first it collects promises, then votes for one value."""

    ballot: Ballot
    electorate: Electorate
    promises: dict[str, Vote[V] | None] = field(default_factory=dict)
    """Acceptor -> the vote that came with its promise; None without a vote."""
    value: V | None = None
    """The proposed value; None before `propose`."""
    accepted_by: set[str] = field(default_factory=set)
    """The acceptors that have accepted the value."""

    @property
    def is_prepared(self) -> bool:
        """Whether a quorum has promised the ballot."""
        return self.electorate.is_quorum(self.promises)

    @property
    def is_decided(self) -> bool:
        """Whether a quorum has accepted the value."""
        return self.electorate.is_quorum(self.accepted_by)

    def note_promise(self, acceptor: str, vote: Vote[V] | None) -> None:
        """Take the promise of an acceptor, with the acceptor's last vote; None: it has not voted. A promise that comes
        after `propose` changes nothing."""
        if self.value is None:
            self.promises.setdefault(acceptor, vote)

    def bound_value(self) -> V | None:
        """Return the value that must be proposed, because it may have been decided already; None if the proposer may
        choose."""
        votes = [vote for vote in self.promises.values() if vote is not None]
        return max(votes, key=lambda vote: vote.ballot).value if votes else None

    def propose(self, value: V) -> None:
        """Begin to collect votes for `value`: the bound value, if there is one."""
        assert self.is_prepared, "a quorum promises first"
        assert self.value is None, "one ballot has one value"
        bound = self.bound_value()
        assert bound is None or bound == value, "a value that may be decided already comes first"
        self.value = value

    def note_accepted(self, acceptor: str) -> None:
        """Take the vote of an acceptor for the proposed value."""
        assert self.value is not None, "a value is proposed first"
        self.accepted_by.add(acceptor)
