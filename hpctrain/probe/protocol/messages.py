"""The messages of a probe as models that validate on arrival: joins, orders to nodes, and answers from nodes.

Every sender has proved to know the token. A malformed message closes its connection, with the reason, but ends neither
the coordinator nor the probe.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, model_validator

from hpctrain.base.net.wire import Message
from hpctrain.probe.measure.backend import BackendReport
from hpctrain.probe.measure.devices import DeviceReport
from hpctrain.probe.measure.figures import PairFigures
from hpctrain.records.format.document import Part
from hpctrain.records.format.message import parse_message
from hpctrain.records.topology.evidence import HostFacts

ERROR_CHARS = 2000
"""Longest error text in a message; the sender truncates it."""

Text = Annotated[str, Field(min_length=1, max_length=1024)]
MaybeEmpty = Annotated[str, Field(max_length=1024)] | None
Port = Annotated[int, Field(gt=0, lt=1 << 16)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class Join(Part):
    """The message with which a node joins the coordinator."""

    kind: Literal["join"]
    node: Text
    addr: Text
    """Address of the node's own listener."""
    port: Port
    iface: MaybeEmpty = None
    host: MaybeEmpty = None
    switches: MaybeEmpty = None
    """SLURM_TOPOLOGY_ADDR on the node."""
    facts: HostFacts | None = None


class PairOrder(Part):
    """Order to measure with a peer: connect to it at `addr` and `port`, or wait for its connection."""

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
    """Order to open the port for the store of all ranks, on this address."""

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
    """An answer with either its content or an error."""

    error: Annotated[str, Field(max_length=ERROR_CHARS)] | None = None

    def _has(self, content: object) -> None:
        if (content is None) == (self.error is None):
            raise ValueError("exactly one of content and error is needed")


class PairAnswer(FailableAnswer):
    """The figures that one end of a pair measured, or the error."""

    kind: Literal["pair"]
    round: Count
    figures: PairFigures | None = None

    @model_validator(mode="after")
    def _one(self) -> PairAnswer:
        self._has(self.figures)
        return self


class Ready(Part):
    """The measuring process is loaded."""

    kind: Literal["ready"] = "ready"


class DevicesAnswer(FailableAnswer):
    """The report of the node's devices, or the error."""

    kind: Literal["devices"] = "devices"
    report: DeviceReport | None = None

    @model_validator(mode="after")
    def _one(self) -> DevicesAnswer:
        self._has(self.report)
        return self


class RendezvousAnswer(FailableAnswer):
    """The port for the store of all ranks, or the error."""

    kind: Literal["rendezvous"] = "rendezvous"
    port: Port | None = None

    @model_validator(mode="after")
    def _one(self) -> RendezvousAnswer:
        self._has(self.port)
        return self


class ExchangeAnswer(FailableAnswer):
    """A rank's report of messages over the training backend, or the error."""

    kind: Literal["exchange"] = "exchange"
    report: BackendReport | None = None

    @model_validator(mode="after")
    def _one(self) -> ExchangeAnswer:
        self._has(self.report)
        return self


Order = PairOrder | PlainOrder | RendezvousOrder | ExchangeOrder
Answer = PairAnswer | Ready | DevicesAnswer | RendezvousAnswer | ExchangeAnswer

_JOIN: TypeAdapter[Join] = TypeAdapter(Join)
_ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


def read_join(message: Message) -> Join:
    """Parse the message of a node that joins.

    Raises:
        MalformedMessage: the message is something else.
    """
    return parse_message(_JOIN, message)


def read_order(message: Message) -> Order:
    """Parse an order of the coordinator.

    Raises:
        MalformedMessage: the message is something else.
    """
    return parse_message(_ORDER, message)


def read_answer(message: Message) -> Answer:
    """Parse an answer of a node.

    Raises:
        MalformedMessage: the message is something else.
    """
    return parse_message(_ANSWER, message)
