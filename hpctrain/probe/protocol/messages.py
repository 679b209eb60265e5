"""The messages of a probe as models, which check each message when it arrives: joins, orders to nodes, and answers from
nodes.

Every sender has proved that it knows the probe's token. On a malformed message the receiver closes the connection and
notes the reason; neither the coordinator nor the probe ends.

For the measurement of messages over the training backend (gloo, NCCL), the module also has the rounds of pairs, the
report of a rank, and the fit of t = alpha + beta·bytes to the reported times.
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
from hpctrain.records.topology.topology import RatesAlone

MAX_ROUNDS = 15
"""Most rounds over the training backend. A rank measures with at most this many others, which is enough for the medians
of the link classes."""
SIZES = (8, 1024, 16384, 131072, 2**19, 2**21, 2**23)
"""Sizes in bytes of the messages over the training backend. Each message is answered by one of the first size."""
LARGE_BYTES = 131072
"""Size in bytes above which fewer messages are timed (`TIMES_LARGE`)."""
TIMES, TIMES_LARGE, TIMES_MIN = 12, 5, 3
"""Timed messages over the training backend: `TIMES` of each size up to `LARGE_BYTES`, `TIMES_LARGE` of each larger
size, and `TIMES_MIN` of a size once the time limit has passed."""
WARM_UP, WARM_UP_LARGER = 5, 1
"""Messages over the training backend that are sent before the timed ones: `WARM_UP` of the first size, `WARM_UP_LARGER`
of each other size."""
LIMIT_S = 0.5
"""Time limit of a size sweep over the training backend, in seconds. A slow link stops at the size at which the limit
passes."""

_NETWORK = re.compile(r"NCCL INFO .*Using network (\S+)")
ERROR_CHARS = 2000
"""Longest error text in a message; the sender truncates it."""
Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class BackendReport(Part):
    """The times of messages over the training backend that one rank measured with its partners."""

    backend: str
    """Name of the backend: gloo or nccl."""
    times: dict[int, SizeTimes]
    """Partner's rank -> (bytes, one-way seconds) of messages to the partner."""
    network: str | None = None
    """Network that NCCL reports for traffic between nodes: IB, Socket, or the name of a plugin. None for gloo."""


def backend_rounds(world: int, seed: int) -> list[list[Pair]]:
    """Return the rounds of pairs of ranks that measure over the training backend: every pair of up to 16 ranks, and the
    first `MAX_ROUNDS` rounds of a larger group."""
    return rounds(world, seed)[:MAX_ROUNDS]


def times_of(size: int) -> int:
    """Return the number of timed messages of `size` bytes over the training backend."""
    return TIMES_LARGE if size > LARGE_BYTES else TIMES


def warm_up_of(size: int) -> int:
    """Return the number of warm-up messages of `size` bytes over the training backend."""
    return WARM_UP if size == SIZES[0] else WARM_UP_LARGER


def choose_backend(kinds: Sequence[set[str]], loopback: bool) -> str:
    """Return 'nccl' when every node has CUDA devices that no other node shares, else 'gloo'.

    Args:
        kinds: for each node the kinds of its devices (cuda, cpu).
        loopback: whether the nodes are processes of one machine, which share its devices; NCCL refuses shared devices.
    """
    return "nccl" if kinds and all("cuda" in on_node for on_node in kinds) and not loopback else "gloo"


def backend_lines(
    names: Sequence[str], reports: Mapping[str, BackendReport]
) -> dict[tuple[str, str], tuple[str, BackendFigures]]:
    """Return (sending node, receiving node) -> (name of the backend, figures of the line through the message times). A
    direction whose times give no line is absent.

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
    """Return the network that NCCL uses between nodes, from its log at NCCL_DEBUG=INFO: IB, Socket, or the name of a
    plugin. None if the log names none."""
    match = _NETWORK.search(log)
    return match.group(1) if match else None


class Join(JoinedNode):
    """The first message of a node to the coordinator: the node's name, and the facts of `JoinedNode`, such as the
    address of its listener."""

    kind: Literal["join"]
    node: Text


class PairOrder(Part):
    """Order to measure with the node `peer` in a round. The caller of the pair connects to the peer at `addr` and
    `port`; the other node waits for this connection."""

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
    measure the devices. over: the probe has ended. alone, which a node gives to one of its measuring processes: measure
    your device while the others of the node are idle."""

    kind: Literal["idle", "devices", "go", "over", "alone"]


class RendezvousOrder(Part):
    """Order to the node of rank 0 to open a port on the address `addr` for the store (torch's TCPStore) through which
    the ranks of the training backend find each other."""

    kind: Literal["rendezvous"] = "rendezvous"
    addr: Text


class ExchangeOrder(Part):
    """Order to measure messages to the other ranks over the training backend, in the rounds that follow from `world`
    and `seed`. The ranks find each other through the store (torch's TCPStore) at `addr` and `port`, with the secret
    `token`."""

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
    """Base class of the answers that have either content or an error. `content` is the name of the field with the
    content."""

    content: ClassVar[str] = "report"
    error: Annotated[str, Field(max_length=ERROR_CHARS)] | None = None

    @model_validator(mode="after")
    def _has_content_or_error(self) -> FailableAnswer:
        if (getattr(self, self.content) is None) == (self.error is None):
            raise ValueError("exactly one of content and error is needed")
        return self


class PairAnswer(FailableAnswer):
    """Answer to `PairOrder`: the figures that this end of the pair measured, or `error`, why it measured none."""

    content = "figures"
    kind: Literal["pair"]
    round: Count
    figures: PairFigures | None = None


class Ready(Part):
    """Answer to the order `devices` (`PlainOrder`): the node's measuring process is loaded and waits for the order
    `go`."""

    kind: Literal["ready"] = "ready"
    device: Literal["cpu", "cuda"] | None = None
    """Kind of the devices that a measuring process will measure; None in a node's answer to the coordinator."""


class DevicesAnswer(FailableAnswer):
    """Answer to the order `go` (`PlainOrder`): the report of the node's devices, or the error. If the measuring process
    does not start, this is also the answer to the order `devices`, with the error."""

    kind: Literal["devices"] = "devices"
    report: DeviceReport | None = None
    """What was measured; None with an error."""


class AloneAnswer(Part):
    """Answer of a measuring process to the order `alone` (`PlainOrder`)."""

    kind: Literal["alone"] = "alone"
    figures: RatesAlone


class RendezvousAnswer(FailableAnswer):
    """Answer to `RendezvousOrder`: the port on which torch's TCPStore listens, or the error."""

    content = "port"
    kind: Literal["rendezvous"] = "rendezvous"
    port: Port | None = None


class ExchangeAnswer(FailableAnswer):
    """Answer to `ExchangeOrder`: a rank's report of messages over the training backend, or the error."""

    kind: Literal["exchange"] = "exchange"
    report: BackendReport | None = None


Order = PairOrder | PlainOrder | RendezvousOrder | ExchangeOrder
Answer = PairAnswer | Ready | DevicesAnswer | RendezvousAnswer | ExchangeAnswer

_JOIN: TypeAdapter[Join] = TypeAdapter(Join)
_ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


def read_join(message: Message) -> Join:
    """Return the message with which a node joins, as a validated model.

    Raises:
        MalformedMessage: the message does not fit the model.
    """
    return parse_message(_JOIN, message)


def read_order(message: Message) -> Order:
    """Return an order of the coordinator, as a validated model.

    Raises:
        MalformedMessage: the message does not fit the model.
    """
    return parse_message(_ORDER, message)


def read_answer(message: Message) -> Answer:
    """Return an answer of a node, as a validated model.

    Raises:
        MalformedMessage: the message does not fit the model.
    """
    return parse_message(_ANSWER, message)
