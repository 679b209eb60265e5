"""The script of a pair, over real TCP: figures from both ends, and a peer that dies, hangs or is slow."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from fake_clock import FakeClock

from hpctrain.base.clock import SystemClock
from hpctrain.probe.measure.figures import PairFigures, bandwidth_of
from hpctrain.probe.measure.settings import MIB, ProbeSettings
from hpctrain.probe.protocol.connections import PeerError
from hpctrain.probe.protocol.pair_measurement import (
    DeadlineSocket,
    answer_size_sweep,
    measure_pair,
    size_sweep,
    stream_receive,
    stream_send,
)

CLOCK = SystemClock()
QUICK = ProbeSettings(bulk_bytes=MIB, bulk_bytes_max=2 * MIB, bulk_s=0.0, pings=20)


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        b, _ = server.accept()
    yield a, b
    a.close()
    b.close()


def stream(sock: socket.socket, seconds: float = 60.0) -> DeadlineSocket:
    return DeadlineSocket(sock, CLOCK, CLOCK.now() + seconds)


def test_both_ends_measure(ends) -> None:
    with ThreadPoolExecutor(1) as pool:
        answerer = pool.submit(measure_pair, stream(ends[1]), False, QUICK)
        caller = measure_pair(stream(ends[0]), True, QUICK)

    for figures in (caller, answerer.result()):
        assert isinstance(figures, PairFigures)
        assert 0 < figures.latency.min <= figures.latency.p50 <= figures.latency.p95 < 0.5
        assert figures.bytes_per_s > 1e6
        assert figures.n >= 1


class Ahead(SystemClock):
    """A machine whose wall clock is ahead of the others."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wall(self) -> float:
        return super().wall() + self._seconds


def test_each_end_sees_how_far_the_others_clock_is_ahead(ends) -> None:
    ahead = DeadlineSocket(ends[1], Ahead(5.0), CLOCK.now() + 60.0)
    with ThreadPoolExecutor(1) as pool:
        answerer = pool.submit(measure_pair, ahead, False, QUICK)
        caller = measure_pair(stream(ends[0]), True, QUICK)

    assert caller.clock_offset_s == pytest.approx(5.0, abs=max(1e-3, caller.clock_error_s))
    assert answerer.result().clock_offset_s == pytest.approx(-5.0, abs=max(1e-3, answerer.result().clock_error_s))
    assert 0 < caller.clock_error_s < 0.5


def test_single_messages_of_each_size_are_timed(ends) -> None:
    settings = replace(QUICK, ladder_bytes=(100, 1000, 10000), ladder_times=4, ladder_limit_s=5.0)
    with ThreadPoolExecutor(1) as pool:
        answerer = pool.submit(answer_size_sweep, stream(ends[1]), settings)
        rungs = size_sweep(stream(ends[0]), settings)
        answerer.result()

    assert [(size, len(samples)) for size, samples in rungs] == [(100, 4), (1000, 4), (10000, 4)]
    assert all(seconds > 0 for _, samples in rungs for seconds in samples)


def test_a_slow_link_is_not_climbed_to_the_top(ends) -> None:
    settings = replace(QUICK, ladder_limit_s=0.0)
    with ThreadPoolExecutor(1) as pool:
        answerer = pool.submit(answer_size_sweep, stream(ends[1]), settings)
        rungs = size_sweep(stream(ends[0]), settings)
        answerer.result()

    assert [(size, len(samples)) for size, samples in rungs] == [(1024, 3)]


class Remembering(SystemClock):
    """A clock that knows what it said last."""

    said = 0.0

    def now(self) -> float:
        self.said = super().now()
        return self.said


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_share_of_a_transfer_that_needed_a_processor(ends, share: float) -> None:
    clock = Remembering()
    timed = DeadlineSocket(ends[0], clock, clock.now() + 60.0)
    with ThreadPoolExecutor(1) as pool:
        answerer = pool.submit(measure_pair, stream(ends[1]), False, QUICK)
        figures = measure_pair(timed, True, QUICK, lambda: share * clock.said)
        answerer.result()

    assert figures.sending_cpu == pytest.approx(share, abs=1e-3)
    assert figures.receiving_cpu == pytest.approx(share, abs=1e-3)


def test_at_least_the_asked_volume_is_sent(ends) -> None:
    with ThreadPoolExecutor(1) as pool:
        arrivals = pool.submit(stream_receive, stream(ends[1]))
        stream_send(stream(ends[0]), QUICK)

    assert arrivals.result()[-1][1] >= QUICK.bulk_bytes


def test_a_slow_link_stops_at_the_time_limit_and_is_timed_at_the_receiver(ends) -> None:
    """The receiver takes 128 KiB every 20 ms of its clock: 6.5 MB/s, whatever the sender's buffers swallow at first."""
    clock = FakeClock()
    for sock, option in ((ends[0], socket.SO_SNDBUF), (ends[1], socket.SO_RCVBUF)):
        sock.setsockopt(socket.SOL_SOCKET, option, 65536)

    class Slow(DeadlineSocket):
        def fill(self, view: memoryview) -> None:
            time.sleep(0.02)
            clock.sleep(0.02)
            super().fill(view)

    settings = replace(QUICK, bulk_bytes=64 * MIB, bulk_bytes_max=64 * MIB, bulk_limit_s=0.5)
    with ThreadPoolExecutor(1) as pool:
        arrivals = pool.submit(stream_receive, Slow(ends[1], clock, clock.now() + 60.0))
        stream_send(stream(ends[0]), settings)

    assert arrivals.result()[-1][1] < 16 * MIB
    assert bandwidth_of(arrivals.result())[0] == pytest.approx(128 * 1024 / 0.02, rel=0.01)


def test_a_dead_peer_is_told_at_once(ends) -> None:
    ends[1].close()

    with pytest.raises(PeerError, match=r"closed the connection|connection broke"):
        measure_pair(stream(ends[0]), True, QUICK)


@pytest.mark.parametrize("caller", [True, False])
def test_a_hung_peer_costs_the_slot_and_no_more(ends, caller: bool) -> None:
    start = CLOCK.now()

    with pytest.raises(PeerError, match="stopped sending"):
        measure_pair(stream(ends[0], seconds=0.3), caller, QUICK)

    assert 0.2 < CLOCK.now() - start < 30.0  # as long as a busy machine may need, and not for ever


def test_a_peer_that_stops_reading_costs_the_slot(ends) -> None:
    with pytest.raises(PeerError, match=r"stopped reading|slot ran out"):
        stream_send(stream(ends[0], seconds=0.3), replace(QUICK, bulk_bytes=256 * MIB, bulk_bytes_max=256 * MIB))
