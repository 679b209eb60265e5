"""The messages with which agents agree on the next generation: strict models with bounds. They travel on the
connections of `PeerMesh`; a message that is no such model closes its connection."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpctrain.agent.consensus import Ballot, Vote
from hpctrain.base.net.wire import MalformedMessage, Message
from hpctrain.records.history.generation import Generation

REASON_CHARS = 1000
"""Most characters of a reason in a message between agents."""

Model = TypeVar("Model", bound=BaseModel)
Text = Annotated[str, Field(min_length=1, max_length=255)]
Number = Annotated[int, Field(ge=0, lt=1 << 31)]
Round = Annotated[int, Field(ge=1, lt=1 << 31)]
Record = Annotated[Generation, Field(strict=False)]


class AgreementMessage(BaseModel):
    """A message about the decision on one generation."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    kind: ClassVar[str]
    """The `type` of the message on the wire."""


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


class Prepare(_BallotMessage):
    """A proposer asks for a promise. A member that still runs the last generation ends it first."""

    kind = "prepare"

    attempt: Number
    """Number of the attempt."""
    reason: Annotated[str, Field(max_length=REASON_CHARS)]
    """Why the last generation ended."""


class PastVote(BaseModel):
    """The last vote of an acceptor, in its promise."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    round: Round
    proposer: Text
    record: Record

    @property
    def vote(self) -> Vote[Generation]:
        """The vote."""
        return Vote(Ballot(self.round, self.proposer), self.record)


class Promise(_BallotMessage):
    """An acceptor will refuse lower ballots."""

    kind = "promise"

    incarnation: Text
    """Incarnation of the acceptor."""
    vote: PastVote | None = None
    """The acceptor's last vote; None if it has accepted no record."""

    @model_validator(mode="after")
    def _about_one_generation(self) -> Promise:
        if self.vote is not None and self.vote.record.number != self.number:
            raise ValueError(f"a vote for generation {self.vote.record.number} in a promise about {self.number}")
        return self


class Refusal(_BallotMessage):
    """An acceptor has promised a higher ballot than this one."""

    kind = "refusal"

    promised_round: Round
    """Round of the ballot that the acceptor has promised."""


class AcceptRequest(_BallotMessage):
    """A proposer with the promises of a quorum asks for votes for a record."""

    kind = "accept"

    record: Record

    @model_validator(mode="after")
    def _about_one_generation(self) -> AcceptRequest:
        if self.record.number != self.number:
            raise ValueError(f"the record of generation {self.record.number} in a request about {self.number}")
        return self


class Accepted(_BallotMessage):
    """An acceptor has voted for the record of this ballot."""

    kind = "accepted"

    incarnation: Text
    """Incarnation of the acceptor."""


class Decided(AgreementMessage):
    """The agents have agreed on a record; sent once to all agents, and later to each that is in an older generation."""

    kind = "decided"

    record: Record


_KINDS: dict[str, type[AgreementMessage]] = {
    model.kind: model for model in (Prepare, Promise, Refusal, AcceptRequest, Accepted, Decided)
}


def write_message(message: AgreementMessage) -> Message:
    """Return a message as JSON values, as it travels."""
    return {"type": message.kind, **message.model_dump(mode="json", by_alias=True)}


def parse_message(message: Message) -> AgreementMessage:
    """Return the model of a message that is no heartbeat.

    Raises:
        MalformedMessage: this program sends no such message.
    """
    content = dict(message)
    kind = content.pop("type", None)
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        expected = ", ".join(["heartbeat", *_KINDS])
        raise MalformedMessage(f"it sent a message of type {str(kind)[:100]!r}; expected: {expected}")
    return validated(model, content)


def validated(model: type[Model], content: Message) -> Model:
    """Return the content of a message as a model.

    Raises:
        MalformedMessage: the content has errors; the first is named.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        mistake = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, mistake["loc"]))
        what = getattr(model, "kind", "heartbeat")
        fault = f"it sent a message of type {what!r} with a wrong {field[:100]!r}: {mistake['msg'][:200]!r}"
        raise MalformedMessage(fault) from None
