"""Measures a pair of nodes over their connection: pings from each side, a size sweep from each side, and a transfer in
each direction.

Both ends run the same parts in the same order, and the end that made the connection starts. The sender of a part marks
its last message, so the two ends need no message from the coordinator during a timed part. Every part raises a
PeerError if the connection breaks, the peer hangs, or the deadline passes.
"""

from __future__ import annotations

import math
import socket
import statistics
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpctrain.base.clock import Clock
from hpctrain.probe.measure.figures import PairFigures, bandwidth_of, clock_offset, latency_of, one_way_s
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.protocol.connections import PeerError

PING_BYTES = 8
BLOCK_BYTES = 128 * 1024
MIN_MESSAGES = 3
"""Fewest messages of a size in a size sweep, even after the time limit."""
_MORE, _LAST, _LARGER = 0, 1, 2
_MIN_BLOCKS = 8
_MIN_PINGS = 8
_WALL = struct.Struct("<d")

Result = TypeVar("Result")
RoundTrip = tuple[float, float]
"""(seconds of the round trip, the peer's clock minus this node's in seconds, if the peer wrote its answer in the middle
of the round trip)"""


class DeadlineSocket:
    """A connected socket with one deadline for all that is sent and received.

    It uses the kernel's time-outs (SO_RCVTIMEO, SO_SNDTIMEO), because Python's own add a poll() to every call, and so
    to the latency.
    """

    def __init__(self, sock: socket.socket, clock: Clock, deadline: float) -> None:
        self._sock = sock
        self.clock = clock
        self._deadline = deadline

    def arm(self) -> None:
        """Set the kernel's time-outs to the time that remains until the deadline.

        Raises:
            PeerError: the deadline has passed.
        """
        remaining_s = self._deadline - self.clock.now()
        if remaining_s <= 0:
            raise PeerError("its slot ran out")
        limit = struct.pack("ll", int(remaining_s), max(1, int(remaining_s % 1 * 1e6)))
        self._sock.setblocking(True)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, data: bytes | bytearray) -> None:
        """Send all of `data`.

        Raises:
            PeerError: the peer stopped reading, the connection broke, or the deadline has passed.
        """
        rest = memoryview(data)
        try:
            while rest := rest[self._sock.send(rest) :]:
                # The kernel's time-out is for one call; a slow peer must not get it again and again.
                if self.clock.now() > self._deadline:
                    raise PeerError("its slot ran out")
        except BlockingIOError:
            raise PeerError("the peer stopped reading") from None
        except OSError as error:
            raise PeerError(f"the connection broke: {error.strerror or error}") from None

    def fill(self, view: memoryview) -> None:
        """Receive until the buffer `view` is full.

        Raises:
            PeerError: the peer stopped sending, the connection broke or closed, or the deadline has passed.
        """
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


def cpu_demand_s(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Return the seconds so far in which this thread has run on a processor or waited for one. Without
    CONFIG_SCHED_INFO in the kernel, the waiting is not counted."""
    try:
        on_cpu_ns, waiting_ns, _ = schedstat.read_text().split()
        return (int(on_cpu_ns) + int(waiting_ns)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()


def measure_pair(
    stream: DeadlineSocket, caller: bool, settings: ProbeSettings, cpu_s: Callable[[], float] = cpu_demand_s
) -> PairFigures:
    """Measure as one end of a pair and return the figures of this end.

    Args:
        caller: whether this end made the connection; the caller starts.
        cpu_s: returns the seconds in which this thread has needed a processor, whether it got one or not.

    Raises:
        PeerError: the peer died or hung, or the link is too slow for the deadline.
        ValidationError: the figures are not valid, such as a time that is not positive (pydantic).
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
    latency = latency_of([seconds for seconds, _ in pings])
    offset, error_s = clock_offset(pings)
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
    """Run `work`. Return (share of its time in which this thread needed a processor, result of `work`). The share is
    None if the clock measured no time.

    Args:
        stream: gives the clock.
        cpu_s: returns the seconds in which this thread has needed a processor, whether it got one or not.
    """
    began_s, used_s = stream.clock.now(), cpu_s()
    result = work()
    took_s = stream.clock.now() - began_s
    return ((cpu_s() - used_s) / took_s if took_s > 0 else None), result


def ping(stream: DeadlineSocket, settings: ProbeSettings) -> list[RoundTrip]:
    """Send pings of 8 bytes and return their round trips, without those of the warm-up. On a slow link there are fewer
    than `settings.pings`.

    Raises:
        PeerError: the peer died or hung, answered with no time, or the link is too slow for the deadline.
    """
    stream.arm()
    answer = memoryview(bytearray(PING_BYTES))
    more, last = bytes([_MORE]) + bytes(PING_BYTES - 1), bytes([_LAST]) + bytes(PING_BYTES - 1)
    now, wall = stream.clock.now, stream.clock.wall
    limit = now() + settings.ping_limit_s
    made: list[RoundTrip] = []
    wanted, least = settings.ping_warm_up + settings.pings, settings.ping_warm_up + _MIN_PINGS

    def one(message: bytes) -> None:
        wall_s, start = wall(), now()
        stream.send(message)
        stream.fill(answer)
        round_trip_s = now() - start
        offset_s = _WALL.unpack(answer)[0] - wall_s - round_trip_s / 2
        if not math.isfinite(offset_s):
            raise PeerError("the peer answered a ping with no time")
        made.append((round_trip_s, offset_s))

    while (count := len(made)) < wanted - 1 and (count < least - 1 or now() < limit):
        one(more)
    one(last)
    return made[settings.ping_warm_up :]


def echo(stream: DeadlineSocket) -> None:
    """Answer every ping with this end's wall clock, until the ping that is marked as the last.

    Raises:
        PeerError: as of `measure_pair`.
    """
    stream.arm()
    buffer = bytearray(PING_BYTES)
    view = memoryview(buffer)
    while True:
        stream.fill(view)
        stream.send(_WALL.pack(stream.clock.wall()))
        if buffer[0] == _LAST:
            return


def size_sweep(stream: DeadlineSocket, settings: ProbeSettings) -> list[tuple[int, list[float]]]:
    """Send single messages of growing size, each answered by 8 bytes. Return for each size (bytes, seconds of each
    round trip).

    The sweep ends with the size at which the time limit passes.

    Raises:
        PeerError: as of `measure_pair`.
    """
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
    """Answer every message of the peer's size sweep with 8 bytes, until the message that is marked as the last.

    Raises:
        PeerError: as of `measure_pair`.
    """
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
    """Send blocks of data until volume and time have both reached their minimum (`bulk_bytes`, `bulk_s`), or one of
    them its maximum (`bulk_bytes_max`, `bulk_limit_s`).

    Raises:
        PeerError: as of `measure_pair`.
    """
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
    """Receive the peer's blocks up to the last one. Return for each block (clock time in seconds when it was complete,
    bytes received so far).

    Raises:
        PeerError: as of `measure_pair`.
    """
    stream.arm()
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    arrivals: list[tuple[float, int]] = []
    while True:
        stream.fill(view)
        arrivals.append((stream.clock.now(), (len(arrivals) + 1) * BLOCK_BYTES))
        if buffer[0] == _LAST:
            return arrivals
