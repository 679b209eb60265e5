"""Placements on nodes with unlike numbers of devices: what sums together stands in one node where it can."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.planner.devices.pool import DeviceSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.search.evaluate import groups_within_nodes, same_kinds
from hpctrain.records.format.node_name import DeviceId

KINDS = ("fast", "slow")


def units_of(nodes):
    """By class, of [node] -> kinds of its devices."""
    devices = [
        DeviceSpec(DeviceId.of(f"n{number}", str(index)), "cuda", kind, 1e12, 1e9, 1e10, 1e-6)
        for number, kinds in enumerate(nodes)
        for index, kind in enumerate(kinds)
    ]
    units = [TensorParallelGroup(index, (device,)) for index, device in enumerate(devices)]
    return [[unit for unit in units if unit.devices[0].type == kind] for kind in KINDS]


def nodes_of(group):
    return {unit.devices[0].node for unit in group}


@st.composite
def nodes_and_needs(draw):
    nodes = draw(st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), min_size=1, max_size=7))
    left = [sum(node.count(kind) for node in nodes) for kind in KINDS]
    needs = []
    for _ in range(draw(st.integers(1, 6))):
        need = [draw(st.integers(0, each)) for each in left]
        left = [each - taken for each, taken in zip(left, need, strict=True)]
        needs.append(need)
    return nodes, needs


@settings(max_examples=60, deadline=None)
@given(nodes_and_needs())
def test_groups_have_what_they_need_and_the_first_stands_in_one_node_where_it_can(case):
    nodes, needs = case
    found = groups_within_nodes(units_of(nodes), needs)
    kinds = [[unit.devices[0].type for unit in group] for group in found]
    assert [[each.count(kind) for kind in KINDS] for each in kinds] == needs
    used = [unit.index for group in found for unit in group]
    assert len(set(used)) == len(used)
    if any(all(node.count(kind) >= asked for kind, asked in zip(KINDS, needs[0], strict=True)) for node in nodes):
        assert len(nodes_of(found[0])) <= 1


def test_nodes_that_hold_a_group_are_kept_for_it():
    """The group that comes first takes the node that it fills, and what no node holds is spread over few."""
    nodes = [["fast"] * 3, ["fast", "fast", "slow", "slow"], ["fast"] * 2, ["slow"] * 3]
    across, within, rest = groups_within_nodes(units_of(nodes), [[3, 1], [2, 2], [2, 2]])
    assert nodes_of(within) == {"n1"}
    assert nodes_of(across) == {"n0", "n3"}
    assert nodes_of(rest) == {"n2", "n3"}


def test_stages_of_an_unlike_kind_each_stand_within_a_node():
    """Two fast and two slow devices a node: the slow ones stay where they are, and a stage of both fills a node."""
    units = sorted(
        (unit for kind in units_of([["fast", "fast", "slow", "slow"]] * 2) for unit in kind),
        key=lambda unit: unit.index,
    )
    fast, slow = ([unit for unit in units if unit.devices[0].type == kind] for kind in KINDS)
    apart = Placement(((fast[0], fast[2]), (fast[1], fast[3]), (slow[2], slow[0]), (slow[3], slow[1])))
    stages, pipelines = same_kinds(units, apart)
    for placement in (stages, pipelines):
        assert [[unit.devices[0].type for unit in row] for row in placement] == [["fast"] * 2] * 2 + [["slow"] * 2] * 2
        assert len({unit for row in placement for unit in row}) == len(units)
    assert [len(nodes_of(stage)) for stage in zip(*stages, strict=True)] == [1, 1]
    assert [len(nodes_of(row)) for row in pipelines] == [1, 1, 1, 1]


def test_a_plan_puts_stages_within_nodes_of_unlike_sizes(plan, topology):
    """As listed, every stage of four has parts of two nodes, and two rings share the card of each large one."""
    made = topology([1.0] * 4, devices=4, default=(5e-5, 1e-7), memory=None)
    nodes = [
        node.model_copy(update={"devices": node.devices[:size], "intra_bytes_per_s": 1e10})
        for node, size in zip(made.nodes, (2, 4, 4, 2), strict=True)
    ]
    fixed = {"mode": "fixed", "pp": 3, "dp": 4, "tp": 1, "zero": 0}
    found = plan(made.model_copy(update={"nodes": nodes}), rows=24, parallel=fixed)
    stages = [{place.node for replica in found.replicas for place in replica.devices[stage]} for stage in range(3)]
    assert sorted(map(sorted, stages)) == [["local0", "local3"], ["local1"], ["local2"]]
