"""What two nodes do over their connection: round trips from each side, single messages of growing size, then a transfer
in each direction.

Both ends follow one script; the caller starts. Nothing but the end of each part is agreed on the way, so no message of
the coordinator lies inside a timed part.
"""

from __future__ import annotations

import math
import socket
import statistics
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.base.clock import Clock
from hpctrain.probe.measure.cpu_time import cpu_demand_s
from hpctrain.probe.measure.figures import PairFigures, bandwidth_of, clock_offset, latency_of
from hpctrain.probe.measure.line_fit import one_way_s
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.protocol.peer_connection import PeerError

PING_BYTES = 8
BLOCK_BYTES = 128 * 1024
MIN_MESSAGES = 3
"""Single messages of a size, when the time is up."""
_MORE, _LAST, _LARGER = 0, 1, 2
_MIN_BLOCKS = 8
_MIN_PINGS = 8
_WALL = struct.Struct("<d")

Result = TypeVar("Result")


@dataclass(frozen=True)
class RoundTrips:
    """Round trips that one end started."""

    round_trips_s: list[float]
    offsets_s: list[float]
    """The peer's clock minus ours, if its answer was written half-way."""


class DeadlineSocket:
    """A connected socket with a deadline for all that happens on it.

    Time-outs are the kernel's own (SO_RCVTIMEO): Python's would add a poll() to every call, and to the latency.
    """

    def __init__(self, sock: socket.socket, clock: Clock, deadline: float) -> None:
        self._sock = sock
        self.clock = clock
        self._deadline = deadline

    def arm(self) -> None:
        """Give the kernel the time that is left.

        Raises:
            PeerError: none is left.
        """
        left = self._deadline - self.clock.now()
        if left <= 0:
            raise PeerError("its slot ran out")
        limit = struct.pack("ll", int(left), max(1, int(left % 1 * 1e6)))
        self._sock.setblocking(True)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, data: bytes | bytearray) -> None:
        """Send all of it, or raise PeerError."""
        rest = memoryview(data)
        try:
            while rest := rest[self._sock.send(rest) :]:
                # The kernel's time-out holds for one call; a peer that reads now and then must not add them up.
                if self.clock.now() > self._deadline:
                    raise PeerError("its slot ran out")
        except BlockingIOError:
            raise PeerError("the peer stopped reading") from None
        except OSError as error:
            raise PeerError(f"the connection broke: {error.strerror or error}") from None

    def fill(self, view: memoryview) -> None:
        """Receive until the buffer is full, or raise PeerError."""
        got = 0
        while got < len(view):
            try:
                count = self._sock.recv_into(view[got:])
            except BlockingIOError:
                raise PeerError("the peer stopped sending") from None
            except OSError as error:
                raise PeerError(f"the connection broke: {error.strerror or error}") from None
            if count == 0:
                raise PeerError("the peer closed the connection")
            got += count
            if self.clock.now() > self._deadline:
                raise PeerError("its slot ran out")


def measure_pair(
    stream: DeadlineSocket, caller: bool, settings: ProbeSettings, cpu_s: Callable[[], float] = cpu_demand_s
) -> PairFigures:
    """Run the script on one end and return what this end measured.

    Args:
        cpu_s: processor seconds that this thread needed so far, got or not.

    Raises:
        PeerError: the peer died, hung, or the link is too slow for the slot.
    """
    if caller:
        pings = ping(stream, settings)
        echo(stream)
        times = size_sweep(stream, settings)
        answer_size_sweep(stream, settings)
        sent_cpu, _ = _share_of_cpu(stream, cpu_s, lambda: stream_send(stream, settings))
        received_cpu, arrivals = _share_of_cpu(stream, cpu_s, lambda: stream_receive(stream))
    else:
        echo(stream)
        pings = ping(stream, settings)
        answer_size_sweep(stream, settings)
        times = size_sweep(stream, settings)
        received_cpu, arrivals = _share_of_cpu(stream, cpu_s, lambda: stream_receive(stream))
        sent_cpu, _ = _share_of_cpu(stream, cpu_s, lambda: stream_send(stream, settings))
    try:
        rate, slices = bandwidth_of(arrivals)
    except ValueError as error:
        raise PeerError(str(error)) from None
    latency = latency_of(pings.round_trips_s)
    offset, error_s = clock_offset(list(zip(pings.round_trips_s, pings.offsets_s, strict=True)))
    return PairFigures(
        latency=latency,
        bytes_per_s=rate,
        n=slices,
        ladder=tuple((size, one_way_s(statistics.median(samples), latency.p50)) for size, samples in times),
        sending_cpu=sent_cpu,
        receiving_cpu=received_cpu,
        clock_offset_s=offset,
        clock_error_s=error_s,
    )


def _share_of_cpu(
    stream: DeadlineSocket, cpu_s: Callable[[], float], work: Callable[[], Result]
) -> tuple[float | None, Result]:
    """The work's result, with the share of its time in which this thread needed a processor."""
    began_s, used_s = stream.clock.now(), cpu_s()
    result = work()
    took_s = stream.clock.now() - began_s
    return ((cpu_s() - used_s) / took_s if took_s > 0 else None), result


def ping(stream: DeadlineSocket, settings: ProbeSettings) -> RoundTrips:
    """Round trips of 8 bytes, without the warm-up; fewer than asked on a slow link."""
    stream.arm()
    answer = memoryview(bytearray(PING_BYTES))
    more, last = bytes([_MORE]) + bytes(PING_BYTES - 1), bytes([_LAST]) + bytes(PING_BYTES - 1)
    now, wall = stream.clock.now, stream.clock.wall
    limit = now() + settings.ping_limit_s
    made = RoundTrips([], [])
    wanted, least = settings.ping_warm_up + settings.pings, settings.ping_warm_up + _MIN_PINGS

    def one(message: bytes) -> None:
        wall_s, start = wall(), now()
        stream.send(message)
        stream.fill(answer)
        made.round_trips_s.append(now() - start)
        made.offsets_s.append(_WALL.unpack(answer)[0] - wall_s - made.round_trips_s[-1] / 2)
        if not math.isfinite(made.offsets_s[-1]):
            raise PeerError("the peer answered a ping with no time")

    while (count := len(made.round_trips_s)) < wanted - 1 and (count < least - 1 or now() < limit):
        one(more)
    one(last)
    return RoundTrips(made.round_trips_s[settings.ping_warm_up :], made.offsets_s[settings.ping_warm_up :])


def echo(stream: DeadlineSocket) -> None:
    """Answer every ping with this end's wall clock, up to the one marked as the last."""
    stream.arm()
    buffer = bytearray(PING_BYTES)
    view = memoryview(buffer)
    while True:
        stream.fill(view)
        stream.send(_WALL.pack(stream.clock.wall()))
        if buffer[0] == _LAST:
            return


def size_sweep(stream: DeadlineSocket, settings: ProbeSettings) -> list[tuple[int, list[float]]]:
    """Seconds of single messages of growing size, each answered by 8 bytes; stops when the time limit is passed."""
    stream.arm()
    answer = memoryview(bytearray(PING_BYTES))
    now = stream.clock.now
    start = now()
    sweep: list[tuple[int, list[float]]] = []
    for size in settings.ladder_bytes:
        message = bytearray(size)
        samples: list[float] = []
        sweep.append((size, samples))
        while message[0] == _MORE:
            late = now() - start >= settings.ladder_limit_s
            if len(samples) >= settings.ladder_times - 1 or (late and len(samples) >= MIN_MESSAGES - 1):
                message[0] = _LAST if late or size == settings.ladder_bytes[-1] else _LARGER
            began = now()
            stream.send(message)
            stream.fill(answer)
            samples.append(now() - began)
        if message[0] == _LAST:
            break
    return sweep


def answer_size_sweep(stream: DeadlineSocket, settings: ProbeSettings) -> None:
    """Answer every message of a peer that climbs."""
    stream.arm()
    answer = bytes(PING_BYTES)
    for size in settings.ladder_bytes:
        view = memoryview(bytearray(size))
        while True:
            stream.fill(view)
            stream.send(answer)
            if view[0] != _MORE:
                break
        if view[0] == _LAST:
            return


def stream_send(stream: DeadlineSocket, settings: ProbeSettings) -> None:
    """Send blocks until volume and time are enough, at most the larger volume, and not beyond the time limit."""
    stream.arm()
    more = bytes(BLOCK_BYTES)
    last = bytes([_LAST]) + bytes(BLOCK_BYTES - 1)
    start = stream.clock.now()
    blocks = 0
    while True:
        spent, volume = stream.clock.now() - start, blocks * BLOCK_BYTES
        enough = volume >= settings.bulk_bytes and spent >= settings.bulk_s
        if blocks >= _MIN_BLOCKS and (enough or volume >= settings.bulk_bytes_max or spent >= settings.bulk_limit_s):
            break
        stream.send(more)
        blocks += 1
    stream.send(last)


def stream_receive(stream: DeadlineSocket) -> list[tuple[float, int]]:
    """Receive blocks up to the last; when each was complete (seconds), with the bytes so far."""
    stream.arm()
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    arrivals: list[tuple[float, int]] = []
    while True:
        stream.fill(view)
        arrivals.append((stream.clock.now(), (len(arrivals) + 1) * BLOCK_BYTES))
        if buffer[0] == _LAST:
            return arrivals
