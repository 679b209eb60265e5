"""Both sides prove the key, neither sends it, and nothing that was seen once is of use again."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.net.authentication import MAX_LINE_BYTES, HandshakeClient, HandshakeServer, Session, derive_key
from hpctrain.base.net.wire import LineChannel, Message

KEY = b"the run's key"
CLAIMS = st.dictionaries(st.text(), st.none() | st.integers() | st.text())


def meet(answerer: HandshakeServer, caller: HandshakeClient) -> tuple[Session, Session, list[Message]]:
    """The sessions of both sides, and all lines that went over the wire."""
    challenge = answerer.challenge()
    hello = caller.answer_challenge(challenge)
    assert hello is not None
    taken = answerer.answer_hello(hello)
    assert taken is not None
    welcome, below = taken
    above = caller.verify_welcome(welcome)
    assert above is not None
    return below, above, [challenge, hello, welcome]


@given(CLAIMS, CLAIMS)
def test_who_knows_the_key_meets_and_neither_the_key_nor_the_seals_are_told(up: Message, down: Message) -> None:
    below, above, lines = meet(HandshakeServer(KEY, down), HandshakeClient(KEY, up))
    assert (below.claims, above.claims) == (up, down)
    assert (below.send_key, below.receive_key) == (above.receive_key, above.send_key)
    wire = json.dumps(lines)
    secrets = [KEY.decode(), below.send_key.hex(), below.receive_key.hex()]
    assert not any(secret in wire for secret in secrets)


def test_the_handshake_of_a_node_with_many_interfaces_is_below_the_longest_line() -> None:
    """The probe's nodes say what they are with the first line: a host of containers has an interface for each."""
    names = [f"veth{number:08x}" for number in range(400)]
    facts = {"mtu": dict.fromkeys(names, 1500), "interfaces": {name: ["198.18.255.255", "f" * 39] for name in names}}
    claims = {"kind": "join", "node": "n" * 64, "addr": "a" * 45, "port": 65535, "host": "h" * 253, "facts": facts}
    lines = meet(HandshakeServer(KEY, claims), HandshakeClient(KEY, claims))[2]
    assert max(len(json.dumps(line)) for line in lines) < MAX_LINE_BYTES


def test_every_meeting_has_its_own_seals() -> None:
    keys = {meet(HandshakeServer(KEY, {}), HandshakeClient(KEY, {}))[0].send_key for _ in range(8)}
    assert len(keys) == 8


def test_another_key_is_found_out_by_either_side() -> None:
    answerer, caller = HandshakeServer(KEY, {}), HandshakeClient(b"another", {})
    hello = caller.answer_challenge(answerer.challenge())
    assert hello is not None
    assert answerer.answer_hello(hello) is None
    own = HandshakeServer(b"another", {}).answer_hello(
        HandshakeClient(b"another", {}).answer_challenge(answerer.challenge()) or {}
    )
    assert own is None


@given(st.sampled_from(["nonce", "claims", "proof"]), st.none() | st.text() | st.integers() | CLAIMS)
def test_a_hello_that_was_changed_is_refused(field: str, value: object) -> None:
    answerer, caller = HandshakeServer(KEY, {}), HandshakeClient(KEY, {"node": "a"})
    hello = caller.answer_challenge(answerer.challenge())
    assert hello is not None
    if hello[field] != value:
        assert answerer.answer_hello({**hello, field: value}) is None


def test_a_hello_that_was_seen_is_of_no_use_to_another_challenge() -> None:
    caller = HandshakeClient(KEY, {})
    hello = caller.answer_challenge(HandshakeServer(KEY, {}).challenge())
    assert hello is not None
    assert HandshakeServer(KEY, {}).answer_hello(hello) is None


def test_a_proof_sent_back_is_no_proof() -> None:
    """Somebody without the key calls two sides, or mirrors what it is told."""
    answerer, caller = HandshakeServer(KEY, {}), HandshakeClient(KEY, {})
    hello = caller.answer_challenge(answerer.challenge())
    assert hello is not None
    assert caller.verify_welcome({"type": "welcome", "claims": {}, "proof": hello["proof"]}) is None
    assert caller.answer_challenge(answerer.challenge()) is None


@pytest.mark.parametrize(
    "message", [{}, {"type": "welcome"}, {"type": "challenge"}, {"type": ["challenge"], "nonce": 1}]
)
def test_nonsense_is_neither_challenge_nor_hello_nor_welcome(message: Message) -> None:
    caller = HandshakeClient(KEY, {})
    assert caller.verify_welcome(message) is None
    assert caller.answer_challenge(message) is None
    assert HandshakeServer(KEY, {}).answer_hello(message) is None


def test_a_derived_secret_tells_nothing_of_another() -> None:
    made = [
        derive_key(KEY, "store", 1),
        derive_key(KEY, "store", 2),
        derive_key(KEY, "store1"),
        derive_key(b"", "store", 1),
    ]
    assert len(set(made)) == 4
    assert derive_key(KEY, "store", 1) == made[0]


def sealed_pair() -> tuple[LineChannel, LineChannel]:
    left, right = map(LineChannel, socket.socketpair())
    below, above, _ = meet(HandshakeServer(KEY, {}), HandshakeClient(KEY, {}))
    left.seal(below.send_key, below.receive_key)
    right.seal(above.send_key, above.receive_key)
    return left, right


@given(st.lists(CLAIMS, max_size=6))
def test_sealed_messages_arrive_in_order_in_both_directions(messages: list[Message]) -> None:
    left, right = sealed_pair()
    for message in messages:
        assert left.send(message)
        assert right.send(message)
    assert left.receive() == right.receive() == messages
    left.close()
    right.close()


@pytest.mark.parametrize("swap", [[0, 0], [1], [1, 0]])
def test_a_sealed_line_repeated_left_out_or_moved_closes_the_channel(swap: list[int]) -> None:
    left, right = sealed_pair()
    spy, sink = socket.socketpair()
    channel = LineChannel(sink)
    channel.seal(b"k", b"k")
    for number in range(2):
        channel.send({"n": number})
    lines = spy.recv(65536).splitlines(keepends=True)
    right.seal(b"k", b"k")
    left.sock.sendall(b"".join(lines[index] for index in swap))
    good = [{"n": 0}] if swap[0] == 0 else []
    assert (right.receive(), right.closed) == (good, True)
    for end in (left.sock, spy, sink):
        end.close()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=40) | st.just("0" * 32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
LINES = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("nonce", "claims", "proof"), VALUES)
    | {"type": st.sampled_from(["challenge", "hello", "welcome"])},
)


@given(LINES, LINES, LINES)
def test_no_line_of_a_stranger_makes_a_session(challenge: Message, hello: Message, welcome: Message) -> None:
    assert HandshakeServer(KEY, {}).answer_hello(hello) is None
    caller = HandshakeClient(KEY, {})
    said = caller.answer_challenge(challenge)
    assert said is None or KEY.decode() not in json.dumps(said)
    assert caller.verify_welcome(welcome) is None
