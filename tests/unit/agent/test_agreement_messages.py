"""Messages of the agreement from whoever knows the key: a model with bounds, or the end of that connection."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_agents import NODES, Cluster, RawPeer, heartbeat

from hpctrain.agent.agreement import RESEND_S, Agreement
from hpctrain.agent.agreement_messages import (
    MAX_HELD,
    REASON_CHARS,
    Accepted,
    AcceptRequest,
    AgreementMessage,
    Decided,
    PastVote,
    Prepare,
    Promise,
    Refusal,
)
from hpctrain.agent.peer_connector import published_address
from hpctrain.agent.tree.reading import PeerMessage, read_message
from hpctrain.base.net.wire import MalformedMessage
from hpctrain.records.history.generation import Generation, Member, StoreAddress
from hpctrain.records.history.memory_state import HeldState, MemorySource, StateHolder

MEMBER = Member(node="n0", incarnation="n0-a", addr="10.0.0.1", store_port=4000)
RECORD = Generation(
    number=4, attempt=1, members=[MEMBER],
    plan="generations/plan-000004.0000.json", store=StoreAddress(addr="10.0.0.1", port=4000, node="n0"), reason="start",
    restore="checkpoints/step-00000010", proposer="n0-a",
)  # fmt: skip
HELD = HeldState(generation=3, plan_sha256="ab" * 32, rank=1, step=7, finishable=True, norm_step=8, size_bytes=99)
BALLOT: dict[str, Any] = {"number": 4, "round": 2, "proposer": "n0-a"}
MESSAGES: list[AgreementMessage] = [
    Prepare(**BALLOT, reason="node n2 is gone"),
    Promise(**BALLOT, incarnation="n1-a"),
    Promise(**BALLOT, incarnation="n1-a", vote=PastVote(round=1, proposer="n2-a", record=RECORD)),
    Refusal(**BALLOT, promised_round=7),
    AcceptRequest(**BALLOT, record=RECORD),
    Accepted(**BALLOT, incarnation="n1-a"),
    Decided(record=RECORD),
    Promise(**BALLOT, incarnation="n1-a", held=(HELD, HELD.model_copy(update={"rank": 2}))),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_message_travels_as_json_and_comes_back(message: AgreementMessage) -> None:
    assert read_message(json.loads(json.dumps(message.to_json()))) == message


@pytest.mark.parametrize(
    ("message", "changed", "named"),
    [
        (MESSAGES[0], {"kind": "order"}, "'order'"),
        (MESSAGES[0], {"kind": None}, "'heartbeat', 'prepare'"),
        (MESSAGES[0], {"kind": ["prepare"]}, "prepare"),
        (MESSAGES[0], {"round": 0}, ".round'"),
        (MESSAGES[0], {"round": 1 << 40}, ".round'"),
        (MESSAGES[0], {"round": "1"}, ".round'"),
        (MESSAGES[0], {"number": -1}, ".number'"),
        (MESSAGES[0], {"proposer": ""}, ".proposer'"),
        (MESSAGES[0], {"reason": "x" * (REASON_CHARS + 1)}, ".reason'"),
        (MESSAGES[0], {"more": 1}, ".more'"),
        (MESSAGES[1], {"incarnation": "n" * 300}, ".incarnation'"),
        (MESSAGES[2], {"number": 5}, "it is about generation 5, with a record of generation 4"),
        (MESSAGES[4], {"number": 5}, "it is about generation 5, with a record of generation 4"),
        (MESSAGES[4], {"record": None}, ".record'"),
        (MESSAGES[6], {"record": {**RECORD.to_json(), "schema": "hpctrain.plan/v1"}}, ".record'"),
        (MESSAGES[6], {"record": {**RECORD.to_json(), "plan": "../../etc/passwd"}}, ".record.plan'"),
        (MESSAGES[6], {"record": {**RECORD.to_json(), "restore": "/etc"}}, ".record.restore'"),
        (MESSAGES[7], {"held": [{**HELD.to_json(), "rank": -1}]}, ".held.0.rank'"),
        (MESSAGES[7], {"held": [{**HELD.to_json(), "more": 1}]}, ".held.0.more'"),
        (MESSAGES[7], {"held": [HELD.to_json()] * (MAX_HELD + 1)}, ".held'"),
    ],
)
def test_a_malformed_message_ends_that_connection_with_the_reason(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], message: AgreementMessage, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(MalformedMessage, match=named.replace("(", r"\(")):
        read_message({**message.to_json(), **changed})
    agent = cluster.start("n0", NODES[:2])
    with RawSocket(cluster) as peer:
        peer.send(json.dumps(message.to_json()).encode(), heartbeat("n1"))
        cluster.until(lambda: agent.view("n1").connected)
        assert agent.peers.take_messages() == [("n1", message)]
        peer.send(json.dumps({**message.to_json(), **changed}).encode())
        cluster.until(lambda: agent.view("n1").lost)
    assert agent.peers.take_messages() == []
    assert "the connection to n1 was closed: " in capsys.readouterr().out


class RawSocket:
    """A connection to n0, proved like the agent n1."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __enter__(self) -> RawPeer:
        address = published_address(self._cluster.folder, "n0")
        assert address is not None
        self._sock = socket.create_connection(address, timeout=1.0)
        peer = RawPeer(self._sock, "n1")
        peer.meet(self._cluster)
        return peer

    def __exit__(self, *_: object) -> None:
        self._sock.close()


def test_agents_send_each_other_messages_in_order_and_wake_for_them(cluster: Cluster) -> None:
    for node in NODES:
        cluster.start(node)
    cluster.all_meet()
    sender, receiver = cluster.agents["n2"], cluster.agents["n0"]
    for message in MESSAGES:
        sender.peers.send(["n0", "nobody"], message)
    arrived: list[tuple[str, AgreementMessage]] = []

    def all_there() -> bool:
        arrived.extend(receiver.peers.take_messages())
        return len(arrived) >= len(MESSAGES)

    cluster.until(all_there)
    assert arrived == [("n2", message) for message in MESSAGES]
    receiver.peers.wake()
    receiver.peers.wait(600.0)


def large_record() -> Generation:
    """A record of 1,000 nodes with long names and addresses, and 8 ranks each, whose state is in memory."""
    chance = random.Random(1)
    names = [f"gpu-partition-rack{at // 16:03d}-node{at:04d}.cluster.{'x' * 180}.example" for at in range(1000)]
    members = [
        Member(
            node=name, incarnation=f"{name}-{chance.randrange(1 << 22)}-{chance.randrange(1 << 50)}",
            addr=":".join(f"{chance.randrange(1 << 16):04x}" for _ in range(8)), store_port=chance.randrange(1 << 16),
        )
        for name in names
    ]  # fmt: skip
    holders = [StateHolder(rank=rank, node=names[rank // 8]) for rank in range(8000)]
    source = MemorySource(
        generation=3, plan="generations/plan.json", step=9, continued=list(range(8000)), holders=holders
    )
    return RECORD.model_copy(update={"members": members, "memory": source})


def large_held(count: int) -> tuple[HeldState, ...]:
    """Parts of states of different ranks."""
    chance = random.Random(1)
    return tuple(
        HELD.model_copy(update={"rank": chance.randrange(1 << 20), "size_bytes": chance.randrange(1 << 40)})
        for _ in range(count)
    )


LARGE = large_record()
LARGE_MESSAGES: list[AgreementMessage] = [
    Prepare(**BALLOT, reason="ü" * REASON_CHARS),
    AcceptRequest(**BALLOT, record=LARGE),
    Decided(record=LARGE),
    Promise(**BALLOT, incarnation="n1-a", vote=PastVote(round=1, proposer="n2-a", record=LARGE), held=large_held(40)),
    Promise(**BALLOT, incarnation="n1-a", held=large_held(MAX_HELD)),
]


@pytest.mark.slow
@pytest.mark.parametrize("fan_out", [None, 2])
@pytest.mark.parametrize("message", LARGE_MESSAGES, ids=lambda message: message.kind)
def test_the_messages_of_a_thousand_nodes_fit_a_connection(
    cluster: Cluster, message: AgreementMessage, fan_out: int | None
) -> None:
    """A send never waits: a message that does not fit would close the connection."""
    for node in NODES:
        cluster.start(node, fan_out=fan_out)
    cluster.all_meet()
    cluster.agents["n1"].peers.send(["n0", "n2"], message)
    for node in ("n0", "n2"):
        arrived: list[tuple[str, AgreementMessage]] = []
        cluster.until(lambda at=node, into=arrived: into.extend(cluster.agents[at].peers.take_messages()) or into)  # type: ignore[misc]
        assert arrived == [("n1", message)]
        assert cluster.agents["n1"].view(node).connected


def test_a_node_with_more_parts_of_states_than_a_promise_takes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[AgreementMessage] = []
    routes: Any = SimpleNamespace(send=lambda _, message: sent.append(message), is_near=lambda _: True)
    held = large_held(MAX_HELD + 1)
    agreement = Agreement(MEMBER, 1, routes, Any, Any, lambda _: True, lambda: held)  # type: ignore[arg-type]
    agreement.enter(0.0, RECORD)
    agreement.receive(1.0, "n9", Prepare(**{**BALLOT, "number": RECORD.number + 1}, reason="a worker died"))
    assert [message.held for message in sent if isinstance(message, Promise)] == [()]
    assert f"{MAX_HELD + 1} parts of states are not used" in capsys.readouterr().out


def test_each_node_of_an_older_generation_is_informed_however_often_others_ask() -> None:
    sent: list[str] = []
    routes: Any = SimpleNamespace(send=lambda nodes, _: sent.extend(nodes), is_near=lambda _: True)
    agreement = Agreement(MEMBER, 1, routes, Any, Any, lambda _: True, tuple)  # type: ignore[arg-type]
    for number in (4, 5):
        agreement.enter(10.0 * number, RECORD.model_copy(update={"number": number}))
        sent.clear()
        for step in range(100):
            now = 10.0 * number + RESEND_S + step * RESEND_S / 100
            agreement.receive(now, "n1", Prepare(**{**BALLOT, "number": number}, reason="late"))
            if step in (50, 51):
                agreement.inform(now, "n2")
        assert sent == ["n1", "n2"]
        agreement.inform(10.0 * number + 2 * RESEND_S, "n1")
        assert sent == ["n1", "n2", "n1"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(["kind", "number", "round", "proposer", "vote", "record", "incarnation", "reason", "__class__"])


@pytest.mark.slow
@given(st.sampled_from(MESSAGES), st.dictionaries(KEYS | st.text(max_size=10), VALUES, max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_change_of_a_message_is_a_message_or_malformed(message: AgreementMessage, changes: dict[str, Any]) -> None:
    content = message.to_json()
    record = content.get("record")
    inner = {**content, "record": record | changes} if isinstance(record, dict) else content
    for mutated in (content | changes, inner, changes):
        with contextlib.suppress(MalformedMessage):
            assert isinstance(read_message(mutated), PeerMessage)
