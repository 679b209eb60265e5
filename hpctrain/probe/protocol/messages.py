"""The messages of a probe as models that validate on arrival: joins, orders to nodes, and answers from nodes.

Every sender has proved that it knows the probe's token. A malformed message closes its connection, with the reason, but
ends neither the coordinator nor the probe.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter, model_validator

from hpctrain.base.net.wire import Message
from hpctrain.probe.measure.devices import DeviceReport
from hpctrain.probe.measure.figures import PairFigures
from hpctrain.probe.measure.outcome import JoinedNode, MaybeEmpty, Port, Text
from hpctrain.probe.protocol.backend import BackendReport
from hpctrain.records.format.document import Part
from hpctrain.records.format.message import parse_message

ERROR_CHARS = 2000
"""Longest error text in a message; the sender truncates it."""

Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class Join(JoinedNode):
    """The message with which a node joins the coordinator."""

    kind: Literal["join"]
    node: Text


class PairOrder(Part):
    """Order to measure with a peer node: connect to it at `addr` and `port`, or wait for its connection."""

    kind: Literal["pair"]
    round: Count
    caller: bool
    peer: Text
    addr: Text | None = None
    port: Port | None = None

    @model_validator(mode="after")
    def _says_whom_to_call(self) -> PairOrder:
        if self.caller and (self.addr is None or self.port is None):
            raise ValueError("a caller needs addr and port")
        return self


class PlainOrder(Part):
    """An order without content. idle: nothing to do in this round. devices: start the measuring process. go: start to
    measure. over: the probe has ended."""

    kind: Literal["idle", "devices", "go", "over"]


class RendezvousOrder(Part):
    """Order to open a port on this address for the store (torch's TCPStore) of all ranks."""

    kind: Literal["rendezvous"] = "rendezvous"
    addr: Text


class ExchangeOrder(Part):
    """Order to measure messages to the other ranks over the training backend."""

    kind: Literal["exchange"]
    backend: Literal["gloo", "nccl"]
    world: Annotated[int, Field(ge=2, lt=1 << 20)]
    rank: Count
    seed: int
    addr: Text
    port: Port
    token: Text
    iface: MaybeEmpty = None
    """The node's network interface; the member fills it in for its measuring process."""


class FailableAnswer(Part):
    """An answer with either its content, in the field `content`, or an error."""

    content: ClassVar[str] = "report"
    error: Annotated[str, Field(max_length=ERROR_CHARS)] | None = None

    @model_validator(mode="after")
    def _has_content_or_error(self) -> FailableAnswer:
        if (getattr(self, self.content) is None) == (self.error is None):
            raise ValueError("exactly one of content and error is needed")
        return self


class PairAnswer(FailableAnswer):
    """Answer: the figures that one end of a pair measured, or the error."""

    content = "figures"
    kind: Literal["pair"]
    round: Count
    figures: PairFigures | None = None


class Ready(Part):
    """Answer: the node's measuring process is loaded."""

    kind: Literal["ready"] = "ready"


class DevicesAnswer(FailableAnswer):
    """Answer: the report of the node's devices, or the error."""

    kind: Literal["devices"] = "devices"
    report: DeviceReport | None = None


class RendezvousAnswer(FailableAnswer):
    """Answer: the port for the store of all ranks, or the error."""

    content = "port"
    kind: Literal["rendezvous"] = "rendezvous"
    port: Port | None = None


class ExchangeAnswer(FailableAnswer):
    """Answer: a rank's report of messages over the training backend, or the error."""

    kind: Literal["exchange"] = "exchange"
    report: BackendReport | None = None


Order = PairOrder | PlainOrder | RendezvousOrder | ExchangeOrder
Answer = PairAnswer | Ready | DevicesAnswer | RendezvousAnswer | ExchangeAnswer

_JOIN: TypeAdapter[Join] = TypeAdapter(Join)
_ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


def read_join(message: Message) -> Join:
    """Parse the message of a node that joins.

    Raises:
        MalformedMessage: the message does not fit the model.
    """
    return parse_message(_JOIN, message)


def read_order(message: Message) -> Order:
    """Parse an order of the coordinator.

    Raises:
        MalformedMessage: the message does not fit the model.
    """
    return parse_message(_ORDER, message)


def read_answer(message: Message) -> Answer:
    """Parse an answer of a node.

    Raises:
        MalformedMessage: the message does not fit the model.
    """
    return parse_message(_ANSWER, message)
