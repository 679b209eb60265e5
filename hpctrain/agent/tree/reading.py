"""Reads all messages between agents: heartbeats, those of the agreement, and those of a tree. They travel on the
connections of `PeerMesh`; a message that is no such model closes its connection."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, TypeAdapter

from hpctrain.agent.agreement_messages import Accepted, AcceptRequest, Decided, Prepare, Promise, Refusal
from hpctrain.agent.peer_messages import Announcement
from hpctrain.agent.tree.messages import Detach, Relayed, TreeSummary
from hpctrain.base.net.wire import Message
from hpctrain.records.format.message import parse_message

PeerMessage = (
    Announcement | Prepare | Promise | Refusal | AcceptRequest | Accepted | Decided | TreeSummary | Relayed | Detach
)

_MESSAGE: TypeAdapter[PeerMessage] = TypeAdapter(Annotated[PeerMessage, Field(discriminator="kind")])


def read_message(message: Message) -> PeerMessage:
    """Return a message of another agent as a model.

    Raises:
        MalformedMessage: this program sends no such message.
    """
    return parse_message(_MESSAGE, message)
