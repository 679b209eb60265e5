"""Messages between processes arrive whole, in order, and nobody waits longer than asked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.wire import LineChannel

MESSAGES = st.lists(
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())),
    max_size=8,
)


@pytest.fixture
def pair() -> Iterator[tuple[LineChannel, LineChannel]]:
    left, right = map(LineChannel, socket.socketpair())
    yield left, right
    left.close()
    right.close()


@given(MESSAGES)
def test_all_messages_arrive_in_order(messages: list[dict[str, Any]]) -> None:
    left, right = map(LineChannel, socket.socketpair())
    for message in messages:
        assert left.send(message)
    assert right.receive() == messages
    left.close()
    right.close()


@given(MESSAGES.filter(bool), st.data())
def test_a_message_that_arrives_in_pieces_is_one(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    raw, other = socket.socketpair()
    sender, spy = map(LineChannel, socket.socketpair())
    for message in messages:
        sender.send(message)
    sender.close()
    wire = b"".join(iter(lambda: spy.sock.recv(1), b""))
    cut = data.draw(st.integers(0, len(wire)))
    channel = LineChannel(other)
    raw.sendall(wire[:cut])
    first = channel.receive()
    raw.sendall(wire[cut:])
    assert first + channel.receive() == messages
    for sock in (raw, other, spy.sock):
        sock.close()


def test_lines_that_are_no_messages_are_passed_over(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    left.sock.sendall(b'GET / HTTP/1.1\r\n\r\n[1]\n"text"\n\xff\xfe\n{"a": 1}\n')
    assert right.wait_message(1.0) == {"a": 1}
    assert not right.closed


def test_nothing_yet_is_no_message_and_no_end(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    assert right.receive() == []
    assert right.wait_message(0.01) is None
    # A wait that timed out must not make the next look at the socket wait, or take silence for the end.
    begin = time.monotonic()
    assert right.receive() == []
    assert time.monotonic() - begin < 0.01
    assert not right.closed
    left.send({"late": True})
    assert right.receive() == [{"late": True}]


def test_a_socket_with_a_timeout_of_its_own_is_not_waited_for() -> None:
    one, other = socket.socketpair()
    one.settimeout(5.0)
    channel = LineChannel(one)
    begin = time.monotonic()
    assert channel.receive() == []
    assert time.monotonic() - begin < 1.0
    assert not channel.closed
    channel.close()
    other.close()


def test_a_peer_that_drips_is_not_waited_for_longer_than_asked(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.02):
            left.sock.sendall(b"x")

    dripper = threading.Thread(target=drip)
    dripper.start()
    begin = time.monotonic()
    assert right.wait_message(0.2) is None
    waited = time.monotonic() - begin
    stop.set()
    dripper.join()
    assert 0.2 <= waited < 1.0


def test_what_arrived_before_the_end_is_still_read(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    left.send({"n": 1})
    left.send({"n": 2})
    left.close()
    assert right.wait_message(1.0) == {"n": 1}
    assert right.wait_message(1.0) == {"n": 2}
    assert right.wait_message(1.0) is None
    assert right.closed
    assert right.wait_message(1.0) is None
    assert right.receive() == []


def test_sending_to_nobody_is_told(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    right.close()
    sent = [left.send({"n": n}) for n in range(3)]
    assert sent[-1] is False
    assert left.closed


def test_a_message_larger_than_any_buffer_arrives(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    message = {"text": "x" * 3_000_000}
    sender = threading.Thread(target=left.send, args=(message,))
    sender.start()
    assert right.wait_message(10.0) == message
    sender.join()
