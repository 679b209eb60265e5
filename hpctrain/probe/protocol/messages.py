"""The messages of a probe as models that validate on arrival: joins, orders to nodes, and answers from nodes.

Every sender has proved that it knows the probe's token. A malformed message closes its connection, with the reason, but
ends neither the coordinator nor the probe.

For messages over the training backend (gloo, NCCL), the module also has the rounds of pairs, a rank's report, and the
fit of t = alpha + beta·bytes to its times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter, model_validator

from hpctrain.base.net.wire import Message
from hpctrain.probe.measure.devices import DeviceReport
from hpctrain.probe.measure.figures import PairFigures, SizeTimes, fit_lines
from hpctrain.probe.measure.outcome import JoinedNode, MaybeEmpty, Port, Text
from hpctrain.probe.pair_selection.rounds import Pair, rounds
from hpctrain.records.format.document import Part
from hpctrain.records.format.message import parse_message
from hpctrain.records.topology.link import BackendFigures

MAX_ROUNDS = 15
"""Most rounds: each node measures with at most this many others, which is enough for the medians of the link
classes."""
SIZES = (8, 1024, 16384, 131072, 2**19, 2**21, 2**23)
"""Sizes of the messages in bytes. Each message is answered by one of the first size."""
LARGE_BYTES = 131072
TIMES, TIMES_LARGE, TIMES_MIN = 12, 5, 3
"""Messages of each size; of each size above `LARGE_BYTES`; and of each size when the time is up."""
WARM_UP, WARM_UP_LARGER = 5, 1
"""Messages that are not counted: of the first size, and of each other size."""
LIMIT_S = 0.5
"""Time limit of a size sweep in seconds: a slow link stops at the size that exceeds it."""

_NETWORK = re.compile(r"NCCL INFO .*Using network (\S+)")
ERROR_CHARS = 2000
"""Longest error text in a message; the sender truncates it."""
Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class BackendReport(Part):
    """The message times that one rank measured with its partners."""

    backend: str
    """Name of the backend: gloo or nccl."""
    times: dict[int, SizeTimes]
    """Peer's rank -> (bytes, one-way seconds) of messages to it."""
    network: str | None = None
    """The network that NCCL reports for traffic between nodes: IB, Socket."""


def backend_rounds(world: int, seed: int) -> list[list[Pair]]:
    """Return rounds of pairs of ranks: all pairs of a small group, the first `MAX_ROUNDS` rounds of a large one."""
    return rounds(world, seed)[:MAX_ROUNDS]


def times_of(size: int) -> int:
    """Return the number of timed messages of this size."""
    return TIMES_LARGE if size > LARGE_BYTES else TIMES


def warm_up_of(size: int) -> int:
    """Return the number of warm-up messages of this size."""
    return WARM_UP if size == SIZES[0] else WARM_UP_LARGER


def choose_backend(kinds: Sequence[set[str]], loopback: bool) -> str:
    """Return 'nccl' when every node has CUDA devices that no other node shares, else 'gloo'.

    Args:
        kinds: the kinds of devices on each node.
        loopback: whether the nodes are processes of one machine; NCCL refuses devices that they share.
    """
    return "nccl" if kinds and all("cuda" in on_node for on_node in kinds) and not loopback else "gloo"


def backend_lines(
    names: Sequence[str], reports: Mapping[str, BackendReport]
) -> dict[tuple[str, str], tuple[str, BackendFigures]]:
    """Return (sender, receiver) -> the backend and the line through its message times.

    Args:
        names: the node of each rank.
        reports: the report of each node.
    """
    # A line needs two sizes. A link too slow for two gets no line.
    measured = [
        (sender, names[peer], times)
        for sender, report in reports.items()
        for peer, times in report.times.items()
        if len(times) >= 2 and 0 <= peer < len(names)
    ]
    lines = {}
    for (sender, target, _), line in zip(measured, fit_lines([times for *_, times in measured]), strict=True):
        if line.beta_s_per_byte == 0:
            continue  # times that do not grow with the size give no bandwidth
        figures = BackendFigures(
            alpha_s=line.alpha_s,
            beta_s_per_byte=line.beta_s_per_byte,
            break_bytes=line.break_bytes,
            network=reports[sender].network,
        )
        lines[sender, target] = (reports[sender].backend, figures)
    return lines


def network_used(log: str) -> str | None:
    """Return the network that NCCL uses between nodes, from its log at NCCL_DEBUG=INFO: IB, Socket, or a plugin."""
    match = _NETWORK.search(log)
    return match.group(1) if match else None


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
