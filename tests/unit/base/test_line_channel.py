"""Messages between processes arrive whole, in order, and nobody waits longer than asked."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.net import wire
from hpctrain.base.net.wire import COMPRESS_BYTES, LINE_LIMIT, MESSAGE_LIMIT, LineChannel

MESSAGES = st.lists(
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())),
    max_size=8,
)

NEVER_S = 600.0
"""Longer than a test may take: who waits so long where nobody should wait fails by the suite's own limit."""


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
    sender, spy = map(LineChannel, socket.socketpair())
    for message in messages:
        sender.send(message)
    sender.close()
    wire = b"".join(iter(lambda: spy.sock.recv(1), b""))
    spy.close()
    cut = data.draw(st.integers(0, len(wire)))
    raw, other = socket.socketpair()
    channel = LineChannel(other)
    raw.sendall(wire[:cut])
    first = channel.receive()
    raw.sendall(wire[cut:])
    assert first + channel.receive() == messages
    raw.close()
    other.close()


def test_lines_that_are_no_messages_are_passed_over(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    left.sock.sendall(b'GET / HTTP/1.1\r\n\r\n[1]\n"text"\n\xff\xfe\n{"a": 1}\n')
    assert right.wait_message(1.0) == {"a": 1}
    assert not right.closed


def test_nothing_yet_is_no_message_and_no_end(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    assert right.receive() == []
    before = right.sock.gettimeout()
    assert right.wait_message(0.1) is None
    # A wait that timed out must not make the next look at the socket wait, or take silence for the end.
    assert right.sock.gettimeout() == before
    assert right.receive() == []
    assert not right.closed
    left.send({"late": True})
    assert right.receive() == [{"late": True}]


def test_a_socket_with_a_timeout_of_its_own_is_not_waited_for() -> None:
    one, other = socket.socketpair()
    one.settimeout(NEVER_S)
    channel = LineChannel(one)
    assert channel.receive() == []
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
    assert right.wait_message(0.2) is None
    stop.set()
    dripper.join()


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
    message = {"text": "x" * 1_000_000}
    sender = threading.Thread(target=left.send, args=(message,))
    sender.start()
    assert right.wait_message(10.0) == message
    sender.join()


@pytest.mark.parametrize("timeout_s", [0.0, 0.2])
def test_who_stops_reading_is_given_up_in_time(timeout_s: float) -> None:
    one, other = socket.socketpair()
    channel = LineChannel(one, send_timeout_s=timeout_s)
    taken, sent = 0, True
    while sent:
        begin = time.monotonic()
        sent = channel.send({"text": "x" * 4000})
        taken += sent
    assert time.monotonic() - begin >= timeout_s
    assert 1 < taken < 1000
    assert channel.closed
    assert channel.send({"n": 1}) is False
    other.close()


def test_who_reads_slowly_is_waited_for() -> None:
    one, other = socket.socketpair()
    writer, reader = LineChannel(one, send_timeout_s=5.0), LineChannel(other)
    received: list[Any] = []

    def read() -> None:
        time.sleep(0.2)
        while (message := reader.wait_message(5.0)) is not None:
            received.append(message)

    thread = threading.Thread(target=read)
    thread.start()
    assert all(writer.send({"n": n, "text": "x" * 4000}) for n in range(200))
    writer.close()
    thread.join()
    assert [message["n"] for message in received] == list(range(200))
    reader.close()


def test_a_channel_without_a_time_limit_waits_until_the_reader_is_gone() -> None:
    one, other = socket.socketpair()
    channel = LineChannel(one, send_timeout_s=None)
    timer = threading.Timer(0.2, other.close)
    begin = time.monotonic()
    timer.start()
    while channel.send({"text": "x" * 4000}):
        pass
    assert time.monotonic() - begin >= 0.2
    timer.join()


def test_json_too_deep_to_read_is_passed_over(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    left.sock.sendall(b"[" * 50_000 + b"\n" + b'{"a":' * 30_000 + b'\n{"n": 1}\n')
    assert right.wait_message(1.0) == {"n": 1}
    assert not right.closed


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_beyond_the_limit_closes_the_channel(end: bytes) -> None:
    one, other = socket.socketpair()
    channel = LineChannel(one, line_limit=1000)
    other.sendall(b'{"n": 1}\n{"text": "' + b"x" * 978 + b'"}\n')
    assert [len(message) for message in channel.receive()] == [1, 1]
    assert not channel.closed
    other.sendall(b'{"n": 2}\n' + b"x" * 1001 + end)
    assert channel.receive() == [{"n": 2}]
    assert channel.closed
    other.close()


def test_an_endless_line_is_not_kept(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    for _ in range(100):
        if right.closed:
            break
        left.sock.sendall(b"x" * 50_000)
        assert right.receive() == []
    assert right.closed


def test_a_flood_of_garbage_does_not_hold_up_who_waits_for_a_message(pair: tuple[LineChannel, LineChannel]) -> None:
    left, right = pair
    stop = threading.Event()
    left.sock.settimeout(0.1)

    def flood() -> None:
        while not stop.is_set():
            try:
                left.sock.sendall(b"garbage\n" * 1000)
            except OSError:
                continue

    flooder = threading.Thread(target=flood)
    flooder.start()
    message = right.wait_message(0.2)  # what is at stake is whether it ever returns
    stop.set()
    flooder.join()
    assert message is None


def test_a_strict_channel_ends_at_the_first_line_that_is_no_message() -> None:
    one, other = socket.socketpair()
    channel = LineChannel(one, strict=True)
    other.sendall(b'{"n": 1}\nGET / HTTP/1.1\n{"n": 2}\n')
    assert channel.receive() == [{"n": 1}]
    assert channel.closed
    assert channel.receive() == []
    other.close()


@pytest.mark.parametrize(
    "line",
    [
        b'{"loss": NaN}',
        b'{"loss": -Infinity}',
        b'{"loss": 1e999}',
        b'{"step": 1' + b"0" * 400 + b"}",
        b'{"step": 1' + b"0" * 5000 + b"}",
        b'{"a":' * 65 + b"1" + b"}" * 65,
        b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_numbers_that_nobody_can_use_and_deep_nests_are_no_message(line: bytes) -> None:
    one, other = socket.socketpair()
    channel = LineChannel(one, strict=True)
    other.sendall(line + b"\n")
    assert channel.receive() == []
    assert (channel.closed, channel.fault) == (True, "it sent a line that is no message")
    other.close()


def test_why_a_channel_was_closed_is_known_where_the_other_side_broke_a_rule() -> None:
    for line, fault in ((b"x" * 200, "more than 100 bytes"), (b"[]\n", "no message"), (b"", "")):
        one, other = socket.socketpair()
        channel = LineChannel(one, line_limit=100, strict=True)
        other.sendall(line)
        other.close()
        channel.receive()
        assert channel.closed
        assert fault in channel.fault
        assert bool(fault) == bool(channel.fault)


@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"\n", b"{}\n", b'{"a": [1e5]}\n']), max_size=12))
def test_any_bytes_are_messages_or_close_the_channel(chunks: list[bytes]) -> None:
    one, other = socket.socketpair()
    channel = LineChannel(one, line_limit=64, strict=True)
    messages = []
    for chunk in chunks:
        try:
            other.sendall(chunk)
        except BrokenPipeError:
            break
        messages += channel.receive()
    assert all(isinstance(message, dict) for message in messages)
    assert channel.closed == bool(channel.fault)
    channel.close()
    other.close()


def compressed(content: bytes) -> bytes:
    return b"z" + base64.b64encode(zlib.compress(content))


def test_a_long_message_is_compressed_only_between_those_who_know_each_other() -> None:
    message = {"names": [f"node{number:06d}.cluster.example" for number in range(40_000)]}
    for seal in (False, True):
        left, right = (LineChannel(sock, compress=not seal, strict=True) for sock in socket.socketpair())
        if seal:
            left.seal(b"there", b"back")
            right.seal(b"back", b"there")
        arrived: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: arrived.append(right.wait_message(NEVER_S) or {}))  # noqa: B023
        reader.start()
        assert left.send(message)
        reader.join()
        assert arrived == [message]
        left.close()
        right.close()
    assert len(json.dumps(message)) > LINE_LIMIT


@pytest.mark.parametrize(
    "line",
    [
        compressed(b'{"a": ' + b" " * MESSAGE_LIMIT + b"1}"),
        compressed(b"[1]"),
        compressed(b'{"a": 1}')[:-4],
        b"z",
        b"z!" + compressed(b'{"a": 1}')[1:],
        b"z" + base64.b64encode(b"no stream"),
        b"z" + base64.b64encode(zlib.compress(b'{"a": 1}') + b"more"),
    ],
    ids=["too long", "no object", "cut off", "empty", "no base64", "no stream", "more behind it"],
)
def test_a_compressed_line_that_is_no_message_closes_the_channel(line: bytes) -> None:
    raw, other = socket.socketpair()
    channel = LineChannel(other, strict=True, compress=True)
    raw.sendall(compressed(b'{"a": 1}') + b"\n" + line + b"\n")
    assert channel.receive() == [{"a": 1}]
    assert channel.fault == "it sent a line that is no message"
    raw.close()


def test_a_stranger_has_nothing_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_expanded", lambda line: pytest.fail("it was expanded"))
    raw, other = socket.socketpair()
    channel = LineChannel(other, strict=True)
    raw.sendall(compressed(b'{"a": 1}') + b"\n")
    assert channel.receive() == []
    assert channel.closed
    raw.close()


def test_a_message_of_some_kilobytes_stays_readable() -> None:
    left, right = (LineChannel(sock, compress=True) for sock in socket.socketpair())
    left.send({"text": "x" * (COMPRESS_BYTES - 100)})
    assert right.sock.recv(1) == b"{"
    left.close()
    right.close()
