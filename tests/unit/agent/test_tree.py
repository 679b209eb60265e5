"""Agents of many nodes: a tree of connections that heals, and over which everybody hears of everybody."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from loopback_agents import NODES, Cluster, RawPeer, heartbeat

from hpctrain.agent.agreement_messages import AgreementMessage, Prepare
from hpctrain.agent.decide import alive
from hpctrain.agent.peer_connector import published_address
from hpctrain.agent.tree.messages import Detach, Identity, Relayed, Row, State, TreeSummary
from hpctrain.agent.tree.order import FAN_OUT, upstream_order
from hpctrain.agent.tree.reading import PeerMessage, read_message
from hpctrain.agent.tree.routing import INDIRECT_S
from hpctrain.agent.tree.table import PeerTable
from hpctrain.base.net.wire import MalformedMessage
from hpctrain.bench.recovery.large_job import measure_large_job
from hpctrain.bench.recovery.simulated_cluster import SimulatedCluster
from hpctrain.bench.recovery.simulated_tree import tree_of
from hpctrain.bench.recovery.simulated_world import HEARTBEAT_TIMEOUT_S

SEVEN = tuple(f"n{index}" for index in range(7))
PREPARE = Prepare(number=4, round=2, proposer="n0-a", reason="node n2 is gone")


def blocks(count: int, fan_out: int) -> int:
    """How many sizes of blocks a tree of `count` nodes has."""
    levels, size = 1, fan_out
    while size < count:
        levels, size = levels + 1, size * fan_out
    return levels


@given(st.integers(2, 8), st.data())
def test_any_nodes_that_live_are_one_tree_with_few_connections_each(fan_out: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 300))
    living = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    upstream = {
        index: next((other for other in upstream_order(index, fan_out) if other in living), None) for index in living
    }
    assert [index for index, other in upstream.items() if other is None] == living[:1]
    for index in living:
        hops = 0
        while (above := upstream[index]) is not None:
            assert above < index
            index, hops = above, hops + 1
        assert hops <= blocks(count, fan_out)
        below = sum(other == index for other in upstream.values())
        assert below <= blocks(count, fan_out) * (fan_out - 1)


def test_of_a_thousand_nodes_each_has_at_most_62_neighbours() -> None:
    upstream = [next(iter(upstream_order(index)), None) for index in range(1000)]
    assert max(upstream.count(index) for index in range(1000)) == 2 * (FAN_OUT - 1)
    assert upstream[:2] + upstream[32:34] + upstream[999:] == [None, 0, 0, 32, 992]


def training(count: int, fan_out: int, seed: int = 1, spares: int = 0) -> SimulatedCluster:
    """Agents in a tree that have agreed on the first generation and train."""
    cluster = SimulatedCluster(count, seed, spares=spares, fan_out=fan_out)
    for node in cluster.nodes:
        cluster.start(node)
    cluster.run(30.0, lambda: cluster.is_training(set(cluster.nodes)))
    assert cluster.is_training(set(cluster.nodes))
    cluster.run(cluster.now + 1.0)
    return cluster


@settings(max_examples=12, deadline=None, phases=[Phase.generate], derandomize=True)
@given(st.integers(2, 4), st.integers(5, 16), st.integers(0, 1000), st.data())
def test_after_any_deaths_that_leave_a_majority_the_others_hear_each_other_and_train(
    fan_out: int, count: int, seed: int, data: st.DataObject
) -> None:
    cluster = training(count, fan_out, seed)
    dead = data.draw(st.sets(st.sampled_from(cluster.nodes), min_size=1, max_size=(count - 1) // 2))
    for node in dead:
        cluster.kill(node)
    rest = set(cluster.nodes) - dead
    cluster.run(cluster.now + 20.0, lambda: max(cluster.records) > 0 and cluster.is_training(rest))
    assert cluster.is_training(rest), cluster.exits
    assert {member.node for member in cluster.records[max(cluster.records)].members} == rest
    cluster.run(cluster.now + 2 * HEARTBEAT_TIMEOUT_S + INDIRECT_S)
    assert cluster.is_training(rest)
    for process in cluster.processes.values():
        tree = tree_of(process)
        heard = {view.node for view in tree.views() if alive(cluster.now, view, cluster.limits)}
        assert heard == rest - {process.node}
        assert len(tree.neighbours) <= blocks(count, fan_out) * (fan_out - 1) + 1
    assert sum(len(tree_of(process).neighbours) for process in cluster.processes.values()) == 2 * (len(rest) - 1)


@pytest.mark.parametrize("silent", range(7))
def test_a_node_that_falls_silent_ends_the_generation_after_the_heartbeat_timeout(silent: int) -> None:
    """Wherever it is in the tree: some neighbour watches it, and tells the others at once."""
    cluster = training(7, 2)
    quiet = cluster.nodes[silent]
    cluster.links.cut = {frozenset((quiet, node)) for node in cluster.nodes if node != quiet}
    rest, begin = set(cluster.nodes) - {quiet}, cluster.now
    cluster.run(begin + 20.0, lambda: max(cluster.records) > 0 and cluster.is_training(rest))
    assert cluster.is_training(rest), cluster.exits
    assert [len(cluster.records[1].members), max(cluster.records)] == [6, 1]
    assert HEARTBEAT_TIMEOUT_S - 0.5 < cluster.decided_at[1] - begin < HEARTBEAT_TIMEOUT_S + 1.5


def test_a_spare_in_the_middle_that_falls_silent_interrupts_nobody() -> None:
    cluster = training(7, 2, spares=1)
    spare = cluster.nodes[6]
    assert spare not in cluster.plans[cluster.records[0].plan].nodes
    assert {"n4", "n6"} <= set(tree_of(cluster.process("n4")).neighbours) | {"n4"}
    cluster.links.cut = {frozenset((spare, node)) for node in cluster.nodes[:6]}
    cluster.run(cluster.now + 3 * HEARTBEAT_TIMEOUT_S)
    assert max(cluster.records) == 0
    assert cluster.is_training(set(cluster.nodes[:6]))


def test_the_lowest_node_comes_back_as_another_agent_and_its_place_is_given_back() -> None:
    cluster = training(7, 2)
    cluster.kill("n0")
    rest = set(cluster.nodes) - {"n0"}
    cluster.run(cluster.now + 5.0, lambda: max(cluster.records) == 1 and cluster.is_training(rest))
    cluster.start("n0")
    cluster.run(cluster.now + 10.0)
    assert cluster.processes["n0"].generation == 1
    assert {"n1", "n2", "n4"} == set(tree_of(cluster.process("n0")).neighbours)
    assert max(cluster.records) == 1, "nobody took the changes of connections for losses"
    process = cluster.process("n3")
    assert process is not None
    process.group.die()
    cluster.run(cluster.now + 10.0, lambda: cluster.is_training(set(cluster.nodes)))
    assert len(cluster.records[2].members) == 7


def test_a_large_job_agrees_within_a_second_of_links_of_a_fifth_of_a_millisecond() -> None:
    rows = measure_large_job(40, fan_out=4)
    assert [row.case for row in rows] == ["node below", "head of a block", "lowest node"]
    assert [row.agents for row in rows] == [40, 39, 38]
    assert all(0 < row.decided_s <= row.entered_s < 1.0 for row in rows)
    assert all(row.neighbours <= 3 * blocks(40, 4) + 1 for row in rows)


def meet(cluster: Cluster, nodes: tuple[str, ...] = SEVEN) -> None:
    for node in nodes:
        cluster.start(node, nodes, fan_out=2)
    cluster.all_meet()


def test_agents_on_sockets_hear_of_all_and_send_to_all(cluster: Cluster) -> None:
    meet(cluster)
    assert {node: len(agent.peers._channels) for node, agent in cluster.agents.items()} == {
        "n0": 3, "n1": 1, "n2": 2, "n3": 1, "n4": 3, "n5": 1, "n6": 1,
    }  # fmt: skip
    for agent in cluster.agents.values():
        for view in agent.peers.views():
            other = cluster.agents[view.node].says
            assert view == other.seen(view.last_seen)
    cluster.agents["n3"].peers.send([*SEVEN, "nobody"], PREPARE)
    arrived: dict[str, list[tuple[str, AgreementMessage]]] = {node: [] for node in SEVEN if node != "n3"}

    def all_there() -> bool:
        for node, messages in arrived.items():
            messages.extend(cluster.agents[node].peers.take_messages())
        return all(arrived.values())

    cluster.until(all_there)
    assert arrived == {node: [("n3", PREPARE)] for node in arrived}


def test_agents_on_sockets_find_another_way_when_one_in_the_middle_ends_and_welcome_it_back(cluster: Cluster) -> None:
    meet(cluster)
    cluster.stop("n4")
    others = [agent for node, agent in cluster.agents.items() if node != "n4"]
    cluster.until(lambda: all(agent.view("n4").lost for agent in others), moves_s=0.01)
    assert all(view.connected for agent in others for view in agent.peers.views() if view.node != "n4")
    cluster.agents["n6"].says = cluster.agents["n6"].says.model_copy(update={"phase": "fault", "reason": "n4 is gone"})
    cluster.until(lambda: all(agent.view("n6").phase == "fault" for agent in others if agent.says.node != "n6"))
    cluster.start("n4", SEVEN, incarnation="second", fan_out=2)
    cluster.all_meet()
    assert {agent.view("n4").incarnation for agent in others} == {"n4-second"}
    assert not any(view.lost for agent in others for view in agent.peers.views())


STATE = State(3, "running", "start")
SUMMARY = TreeSummary(
    rows=(Row(1, 1, 7, 0), Row(2, 1, -5, 0)), states=(STATE,), asks=(2,),
    identities=(Identity(index=1, since=1, incarnation="n1-a", addr="127.0.0.1", store_port=1),),
)  # fmt: skip
TREE_MESSAGES = [SUMMARY, Relayed(origin=1, targets=(0, 2), hops=3, message=PREPARE), Detach()]


@pytest.mark.parametrize("message", TREE_MESSAGES, ids=lambda message: message.kind)
def test_messages_of_a_tree_travel_as_json(message: Any) -> None:
    assert read_message(json.loads(json.dumps(message.to_json()))) == message


@pytest.mark.parametrize(
    "content",
    [
        SUMMARY.to_json() | {"rows": [[1, 1, 7, 1]]},
        SUMMARY.to_json() | {"rows": [[1, 1, 7]]},
        SUMMARY.to_json() | {"rows": [[-1, 1, 7, 0]]},
        SUMMARY.to_json() | {"rows": [[1, 1, 1 << 40, 0]]},
        SUMMARY.to_json() | {"states": [[3, "asleep", "", []]]},
        SUMMARY.to_json() | {"asks": [1 << 20]},
        TREE_MESSAGES[1].to_json() | {"hops": 1000},
        TREE_MESSAGES[1].to_json() | {"message": SUMMARY.to_json()},
        TREE_MESSAGES[1].to_json() | {"message": {**PREPARE.to_json(), "round": 0}},
        json.loads(heartbeat("n1")),
        PREPARE.to_json(),
    ],
)
def test_anything_else_ends_the_connection(cluster: Cluster, content: dict[str, Any]) -> None:
    agent = cluster.start("n0", NODES, fan_out=2)
    address = published_address(cluster.folder, "n0")
    assert address is not None
    with socket.create_connection(address, timeout=1.0) as sock:
        peer = RawPeer(sock, "n1")
        peer.meet(cluster)
        peer.send(json.dumps(SUMMARY.to_json()).encode())
        cluster.until(lambda: agent.view("n1").connected)
        assert agent.view("n1").reason == "start"
        peer.send(json.dumps(content).encode())
        cluster.until(lambda: agent.view("n1").lost)
    assert agent.peers.take_messages() == []


def test_agents_that_each_hear_all_others_take_no_summaries(cluster: Cluster) -> None:
    agent = cluster.start("n0", NODES)
    address = published_address(cluster.folder, "n0")
    assert address is not None
    with socket.create_connection(address, timeout=1.0) as sock:
        peer = RawPeer(sock, "n1")
        peer.meet(cluster)
        peer.send(heartbeat("n1"))
        cluster.until(lambda: agent.view("n1").connected)
        peer.send(json.dumps(SUMMARY.to_json()).encode())
        cluster.until(lambda: agent.view("n1").lost)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(["kind", *TreeSummary.model_fields, *Relayed.model_fields]) | st.text(max_size=10)


@given(st.sampled_from(TREE_MESSAGES), st.dictionaries(FIELDS, VALUES, max_size=3))
@settings(max_examples=100, deadline=None)
def test_any_change_of_a_message_of_a_tree_is_a_message_or_malformed(message: Any, changes: dict[str, Any]) -> None:
    for content in (message.to_json() | changes, changes):
        with contextlib.suppress(MalformedMessage):
            assert isinstance(read_message(content), PeerMessage)


ROWS = st.lists(st.tuples(st.integers(0, 3), st.just(1), st.integers(-9, 9).filter(bool)), max_size=6)


@given(st.lists(ROWS, max_size=5), st.randoms())
def test_of_two_life_signs_the_newer_counts_in_whatever_order_they_come(told: list[Any], chance: Any) -> None:
    """Lost after beat 5 is newer than beat 5, and older than beat 6."""
    identities = tuple(
        Identity(index=index, since=1, incarnation=f"n{index}-a", addr="a", store_port=1) for index in range(1, 4)
    )
    summaries = [
        TreeSummary(rows=tuple(Row(*row, 0) for row in rows), states=(STATE,), identities=identities) for rows in told
    ]
    tables = [PeerTable("n0", SEVEN[:4]), PeerTable("n0", SEVEN[:4])]
    for table in tables:
        for summary in [*summaries, *summaries]:
            table.merge(1.0, 1, summary)
        chance.shuffle(summaries)
    assert [(entry.beat, entry.lost) for entry in tables[0].entries] == [
        (entry.beat, entry.lost) for entry in tables[1].entries
    ]
    for index in range(1, 4):
        beats = [row[2] for rows in told for row in rows if row[0] == index]
        newest = max(map(abs, beats), default=0)
        assert (tables[0].entries[index].beat, tables[0].entries[index].lost) == (
            newest,
            -newest in beats and newest > 0,
        )
