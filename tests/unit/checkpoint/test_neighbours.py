"""On which node the copy of a rank's state lies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.memory.choose import pieces_of
from hpctrain.checkpoint.memory.neighbours import hosts_of
from hpctrain.records.plan.plan import Plan, Replica, Stage

EIGHT = [f"n{number}" for number in range(8)]


def plan_on(nodes: list[str], zero: int = 1, ranks_per_node: int = 1) -> Plan:
    devices = [f"{node}:cpu{local}" for node in nodes for local in range(ranks_per_node)]
    replicas = [Replica(sequences=1, micro_batch=1, micro_batches=1, devices=[[device]]) for device in devices]
    return Plan(
        pp=1, dp=len(devices), tp=1, stages=[Stage(layers=(0, 2))], replicas=replicas, ranks=devices, zero=zero
    )  # fmt: skip


def test_the_copy_is_on_the_next_node() -> None:
    assert hosts_of(plan_on(["a", "b", "c"]), {}) == {0: 1, 1: 2, 2: 0}


def test_the_copy_is_behind_another_switch() -> None:
    switches = {node: f"s{number % 2}" for number, node in enumerate(EIGHT)}
    hosts = hosts_of(plan_on(EIGHT), switches)
    assert all(switches[EIGHT[rank]] != switches[EIGHT[host]] for rank, host in hosts.items())


def test_what_another_node_has_too_is_not_copied() -> None:
    assert hosts_of(plan_on(["a", "b"], zero=0), {}) == {}
    assert hosts_of(plan_on(["a"], ranks_per_node=2), {}) == {}


def test_the_ranks_of_a_node_go_to_the_ranks_of_another() -> None:
    assert hosts_of(plan_on(["a", "b"], ranks_per_node=2), {}) == {0: 2, 1: 3, 2: 0, 3: 1}


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_every_node_keeps_the_copies_of_one_node(behind: list[int]) -> None:
    nodes = [f"n{number}" for number in range(len(behind))]
    switches = {node: f"s{number}" for node, number in zip(nodes, behind, strict=True)}
    plan = plan_on(nodes)
    hosts = hosts_of(plan, switches)
    assert sorted(hosts) == sorted(hosts.values()) == sorted(pieces_of(plan))
    assert all(host != rank for rank, host in hosts.items())
    largest = max(list(switches.values()).count(switch) for switch in switches.values())
    if 2 * largest <= len(nodes):
        assert all(switches[nodes[rank]] != switches[nodes[host]] for rank, host in hosts.items())
