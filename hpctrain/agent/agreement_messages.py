"""The messages with which agents agree on the next generation: strict models with bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hpctrain.agent.consensus import Ballot, Vote
from hpctrain.agent.hang_report import MAX_WORKERS_PER_NODE
from hpctrain.base.net.wire import Message
from hpctrain.records.history.generation import Generation
from hpctrain.records.history.memory_state import HeldState

REASON_CHARS = 1000
"""Most characters of a reason in a message between agents."""
MAX_HELD = 10 * MAX_WORKERS_PER_NODE
"""Most parts of states in a promise: for each worker of a node its own state, two snapshots of it and two of a rank on
another node, and as many from which the workers have just started."""

Text = Annotated[str, Field(min_length=1, max_length=255)]
Number = Annotated[int, Field(ge=0, lt=1 << 31)]
Round = Annotated[int, Field(ge=1, lt=1 << 31)]
Record = Annotated[Generation, Field(strict=False)]


class StrictModel(BaseModel):
    """A message between agents, or a part of one. No value is converted to the type of a field, except where JSON lacks
    this type."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    def to_json(self) -> Message:
        """Return the model as JSON values, as it travels."""
        return self.model_dump(mode="json", by_alias=True)


class AgreementMessage(StrictModel):
    """A message about the decision on one generation. `kind` is its name on the wire."""


class _BallotMessage(AgreementMessage):
    """A message about one ballot."""

    number: Number
    """Number of the generation to be decided."""
    round: Round
    """Round of the ballot."""
    proposer: Text
    """Incarnation of the proposing agent, the second part of the ballot."""

    @property
    def ballot(self) -> Ballot:
        """The ballot that the message is about."""
        return Ballot(self.round, self.proposer)

    @property
    def named(self) -> Generation | None:
        """The record that the message carries; None if it carries none."""
        return None

    @model_validator(mode="after")
    def _about_one_generation(self) -> _BallotMessage:
        if self.named is not None and self.named.number != self.number:
            raise ValueError(f"it is about generation {self.number}, with a record of generation {self.named.number}")
        return self


class Prepare(_BallotMessage):
    """A proposer asks for a promise. A member that still runs the last generation ends it before it promises."""

    kind: Literal["prepare"] = "prepare"

    reason: Annotated[str, Field(max_length=REASON_CHARS)]
    """Why the last generation ended."""


class PastVote(StrictModel):
    """The last vote of an acceptor, in its promise."""

    round: Round
    proposer: Text
    record: Record

    @property
    def vote(self) -> Vote[Generation]:
        """The vote."""
        return Vote(Ballot(self.round, self.proposer), self.record)


class Promise(_BallotMessage):
    """An acceptor will refuse lower ballots."""

    kind: Literal["promise"] = "promise"

    incarnation: Text
    """Incarnation of the acceptor."""
    vote: PastVote | None = None
    """The acceptor's last vote; None if it has accepted no record."""
    # JSON has no tuples, and a strict field takes no list for one.
    held: Annotated[tuple[HeldState, ...], Field(max_length=MAX_HELD, strict=False)] = ()
    """Parts of training states in the memory of the acceptor's node, after its workers have ended."""

    @property
    def named(self) -> Generation | None:
        return None if self.vote is None else self.vote.record


class Refusal(_BallotMessage):
    """An acceptor has promised a higher ballot than this one."""

    kind: Literal["refusal"] = "refusal"

    promised_round: Round
    """Round of the ballot that the acceptor has promised."""


class AcceptRequest(_BallotMessage):
    """A proposer with the promises of a quorum asks for votes for a record."""

    kind: Literal["accept"] = "accept"

    record: Record

    @property
    def named(self) -> Generation | None:
        return self.record


class Accepted(_BallotMessage):
    """An acceptor has voted for the record of this ballot."""

    kind: Literal["accepted"] = "accepted"

    incarnation: Text
    """Incarnation of the acceptor."""


class Decided(AgreementMessage):
    """The agents have agreed on a record; sent once to all agents, and later to each that is in an older generation."""

    kind: Literal["decided"] = "decided"

    record: Record
