"""What two nodes do over their connection: round trips from each side, then a transfer in each direction.

Both ends follow one script; the caller starts. Nothing but the end of each part is agreed on the way, so no message of
the coordinator lies inside a timed part.
"""

from __future__ import annotations

import socket
import struct

from hpctrain.base.clock import Clock
from hpctrain.probe.door import Broken
from hpctrain.probe.figures import PairFigures, bandwidth_of, latency_of
from hpctrain.probe.settings import ProbeSettings

PING_BYTES = 8
BLOCK_BYTES = 128 * 1024
_MORE, _LAST = 0, 1
_MIN_BLOCKS = 8
_MIN_PINGS = 8


class Stream:
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
            Broken: none is left.
        """
        left = self._deadline - self.clock.now()
        if left <= 0:
            raise Broken("its slot ran out")
        limit = struct.pack("ll", int(left), max(1, int(left % 1 * 1e6)))
        self._sock.setblocking(True)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, data: bytes | bytearray) -> None:
        """Send all of it, or raise Broken."""
        try:
            self._sock.sendall(data)
        except BlockingIOError:
            raise Broken("the peer stopped reading") from None
        except OSError as error:
            raise Broken(f"the connection broke: {error.strerror or error}") from None

    def fill(self, view: memoryview) -> None:
        """Receive until the buffer is full, or raise Broken."""
        got = 0
        while got < len(view):
            try:
                count = self._sock.recv_into(view[got:])
            except BlockingIOError:
                raise Broken("the peer stopped sending") from None
            except OSError as error:
                raise Broken(f"the connection broke: {error.strerror or error}") from None
            if count == 0:
                raise Broken("the peer closed the connection")
            got += count
            if self.clock.now() > self._deadline:
                raise Broken("its slot ran out")


def measure_pair(stream: Stream, caller: bool, settings: ProbeSettings) -> PairFigures:
    """Run the script on one end and return what this end measured.

    Raises:
        Broken: the peer died, hung, or the link is too slow for the slot.
    """
    if caller:
        round_trips = ping(stream, settings)
        echo(stream)
        pour(stream, settings)
        arrivals = drain(stream)
    else:
        echo(stream)
        round_trips = ping(stream, settings)
        arrivals = drain(stream)
        pour(stream, settings)
    try:
        rate, slices = bandwidth_of(arrivals)
    except ValueError as error:
        raise Broken(str(error)) from None
    return PairFigures(latency=latency_of(round_trips), bytes_per_s=rate, n=slices)


def ping(stream: Stream, settings: ProbeSettings) -> list[float]:
    """Seconds of each round trip of 8 bytes, without the warm-up; fewer than asked on a slow link."""
    stream.arm()
    answer = memoryview(bytearray(PING_BYTES))
    more, last = bytes([_MORE]) + bytes(PING_BYTES - 1), bytes([_LAST]) + bytes(PING_BYTES - 1)
    now = stream.clock.now
    limit = now() + settings.ping_limit_s
    samples: list[float] = []
    wanted, least = settings.ping_warm_up + settings.pings, settings.ping_warm_up + _MIN_PINGS
    while len(samples) < wanted - 1 and (len(samples) < least - 1 or now() < limit):
        start = now()
        stream.send(more)
        stream.fill(answer)
        samples.append(now() - start)
    start = now()
    stream.send(last)
    stream.fill(answer)
    samples.append(now() - start)
    return samples[settings.ping_warm_up :]


def echo(stream: Stream) -> None:
    """Send back every ping, up to the one marked as the last."""
    stream.arm()
    buffer = bytearray(PING_BYTES)
    view = memoryview(buffer)
    while True:
        stream.fill(view)
        stream.send(buffer)
        if buffer[0] == _LAST:
            return


def pour(stream: Stream, settings: ProbeSettings) -> None:
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


def drain(stream: Stream) -> list[tuple[float, int]]:
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
