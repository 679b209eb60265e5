"""The parts of the planner by themselves: sharing out, simulation, ring sums, orders of devices."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.planner.devices.links import Links, message_s, ring_all_reduce_s
from hpctrain.planner.devices.pool import DeviceSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.partition import split_evenly
from hpctrain.planner.layout.placement import (
    MAX_ORDERS,
    node_orders,
    placements,
    rank_permutations,
    staggered_replicas,
)
from hpctrain.planner.simulate.engine import StageDurations, simulate
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.schedule import Schedule
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.schedule.generate import make_schedule

seconds = st.floats(0.01, 100)


def pace_of(forward, backward, send=0.0):
    hops = len(forward) - 1
    return StageDurations(tuple(forward), tuple(backward), (send,) * hops, (send,) * hops)


@given(st.integers(1, 10), st.lists(st.tuples(seconds, st.floats(0, 50)), min_size=1, max_size=4), st.data())
def test_sharing_out_is_as_good_as_trying_everything(total, stages, data):
    least = [data.draw(st.integers(0, 1)) for _ in stages]
    most = [data.draw(st.integers(1, 10)) for _ in stages]

    def time(index, count):
        return stages[index][1] + count * stages[index][0]

    ways = [
        counts
        for counts in itertools.product(*(range(low, high + 1) for low, high in zip(least, most, strict=True)))
        if sum(counts) == total
    ]
    found = split_evenly(total, time, least, most)
    if not ways:
        assert found is None
        return
    best = min(max(time(i, n) for i, n in enumerate(counts)) for counts in ways)
    assert sum(found) == total
    assert max(time(i, n) for i, n in enumerate(found)) == pytest.approx(best)


@given(st.integers(1, 6), st.integers(1, 12), seconds, seconds, st.sampled_from(["1f1b", "gpipe"]))
def test_equal_stages_take_the_closed_form(pp, micro_batches, forward, backward, name):
    line = simulate(make_schedule(name, pp, pp, micro_batches), pace_of([forward] * pp, [backward] * pp))
    assert line.makespan == pytest.approx((micro_batches + pp - 1) * (forward + backward))
    busy = sum(end - start for _, start, end in line.spans[pp - 1])
    assert line.makespan - busy == pytest.approx((pp - 1) * (forward + backward))


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=4), st.integers(1, 6), st.floats(0, 5))
def test_a_timeline_obeys_what_actions_need(stages, micro_batches, send):
    forward, backward = zip(*stages, strict=True)
    table = make_schedule("1f1b", len(stages), len(stages), micro_batches)
    line = simulate(table, pace_of(forward, backward, send))
    at = {str(action): (start, end) for row in line.spans for action, start, end in row}
    for stage, micro_batch in itertools.product(range(1, len(stages)), range(micro_batches)):
        assert at[f"{stage}F{micro_batch}"][0] >= at[f"{stage - 1}F{micro_batch}"][1] + send - 1e-9
        assert at[f"{stage - 1}B{micro_batch}"][0] >= at[f"{stage}B{micro_batch}"][1] + send - 1e-9
    for row in line.spans:
        assert all(before[2] <= after[1] + 1e-9 for before, after in itertools.pairwise(row))
    assert line.makespan >= simulate(table, pace_of(forward, backward)).makespan - 1e-9


def test_one_micro_batch_goes_there_and_back():
    line = simulate(make_schedule("1f1b", 3, 3, 1), pace_of([1, 2, 3], [4, 5, 6], send=0.5))
    assert line.makespan == pytest.approx(1 + 0.5 + 2 + 0.5 + 3 + 6 + 0.5 + 5 + 0.5 + 4)


def test_a_split_backward_lets_the_stage_before_start_earlier():
    whole = simulate(Schedule.parse([["0F0", "0B0"], ["1F0", "1B0"]]), pace_of([1, 1], [2, 2]))
    split = simulate(Schedule.parse([["0F0", "0B0"], ["1F0", "1I0", "1W0"]]), pace_of([1, 1], [2, 2]))
    assert (whole.makespan, split.makespan) == (6, 5)


def test_a_table_that_waits_for_ever_is_an_error():
    with pytest.raises(ValueError, match="cannot be executed"):
        simulate(Schedule.parse([["0B0", "0F0"]]), pace_of([1], [1]))


def devices(*names):
    return [DeviceId(name) for name in names]


def test_sums_and_messages_follow_alpha_and_beta(topology):
    links = Links(LinkCost(topology((1, 1, 1), devices=2, links={(0, 1): (1e-3, 1e-6)}, default=(1e-4, 1e-8))))
    assert message_s(links, devices("local0:cpu0"), devices("local1:cpu0"), 1000) == pytest.approx(1e-3 + 1e-3)
    both = message_s(links, devices("local0:cpu0", "local0:cpu1"), devices("local1:cpu0", "local1:cpu1"), 1000)
    assert both == pytest.approx(1e-3 + 2 * 1e-3), "two messages share the node's network card"
    ring = ring_all_reduce_s(links, devices("local0:cpu0", "local2:cpu0"), 1000)
    assert ring == pytest.approx(2 * (1e-4 + 500 * 1e-8))
    assert ring_all_reduce_s(links, devices("local0:cpu0", "local1:cpu0", "local2:cpu0"), 3000) == pytest.approx(
        4 * (1e-3 + 1e-3)
    )


def test_a_sum_goes_node_by_node_where_that_is_faster(topology):
    links = Links(LinkCost(topology((1, 1), devices=4, default=(1e-6, 1e-6))))
    eight = [DeviceId.of(f"local{node}", f"cpu{device}") for node in (0, 1) for device in range(4)]
    size = 1e6
    ring, by_node = ring_all_reduce_s(links, eight, size), ring_all_reduce_s(links, eight, size, by_node=True)
    assert ring == pytest.approx(2 * 7 / 8 * size * 1e-6, rel=0.01), "each byte crosses the network 7/4 times"
    assert by_node == pytest.approx(size * 1e-6, rel=0.01), "once; what is summed within nodes is nearly free here"
    assert ring_all_reduce_s(links, eight[:5], size, by_node=True) == ring_all_reduce_s(links, eight[:5], size), (
        "4 and 1 on a node"
    )
    assert ring_all_reduce_s(links, eight[:4], size, by_node=True) == ring_all_reduce_s(links, eight[:4], size), (
        "one node"
    )


def units(count):
    device = DeviceSpec(DeviceId("a:b"), "cpu", "type", 1.0, None, 1.0, 0.0)
    return [TensorParallelGroup(index, (device,)) for index in range(count)]


def cells_of(count, classes, pp, dp):
    found, complete = placements(units(count), classes, pp, dp, lambda a, b: abs(a.index - b.index))
    return [tuple(tuple(unit.index for unit in replica) for replica in placement) for placement in found], complete


def test_equal_devices_have_one_order():
    assert cells_of(6, [0] * 6, 3, 2) == ([((0, 1, 2), (3, 4, 5))], True)


def test_hundreds_of_equal_devices_have_one_order_too():
    found, complete = cells_of(512, [0] * 512, 8, 64)
    assert (len(found), complete) == (1, True)


@pytest.mark.parametrize(("pp", "dp", "expected"), [(4, 1, 24), (1, 4, 1), (2, 2, 12), (3, 1, 24), (1, 2, 6)])
def test_different_devices_are_tried_in_every_order_but_replicas_are_not_exchanged(pp, dp, expected):
    found, complete = cells_of(4, [0, 1, 2, 3], pp, dp)
    assert complete
    assert len(set(found)) == len(found) == expected


@given(st.lists(st.integers(0, 2), min_size=2, max_size=5), st.integers(1, 3), st.integers(1, 3))
def test_every_order_of_classes_is_there_once(classes, pp, dp):
    size = pp * dp
    if size > len(classes):
        return
    found, complete = cells_of(len(classes), classes, pp, dp)
    assert complete

    def replicas(sequence):
        return tuple(sorted(tuple(sequence[start : start + pp]) for start in range(0, size, pp)))

    expected = {replicas(order) for order in itertools.permutations(classes, size)}
    assert sorted(replicas([classes[i] for row in placement for i in row]) for placement in found) == sorted(expected)


def test_many_devices_are_tried_in_likely_orders():
    device = DeviceSpec(DeviceId("a:b"), "cpu", "type", 1.0, None, 1.0, 0.0)
    many = [
        TensorParallelGroup(index, (replace(device, device_id=DeviceId(f"node{index}:cpu0")),)) for index in range(16)
    ]
    found, complete = placements(many, list(range(16)), 4, 4, lambda a, b: abs(a.index - b.index))
    assert not complete
    assert 1 < len(found) <= MAX_ORDERS
    assert all(sorted(unit.index for row in placement for unit in row) == list(range(16)) for placement in found)


def test_pipeline_ranks_are_turned_round_and_unlike_ones_exchanged():
    fast, slow = (DeviceSpec(DeviceId("a:b"), "cpu", f"type{speed}", speed, None, 1.0, 0.0) for speed in (2.0, 1.0))
    placement = Placement([tuple(TensorParallelGroup(index, (slow if index == 0 else fast,)) for index in range(3))])
    found = [[unit.index for unit in turned[0]] for turned in rank_permutations(placement)]
    assert found == [[2, 1, 0], [1, 0, 2], [2, 1, 0]]
    assert not list(rank_permutations(Placement([placement[0][1:]]))), "equal ranks"


def test_nodes_take_other_places_along_a_pipeline_and_their_ranks_stay_together():
    device = DeviceSpec(DeviceId("a:b"), "cpu", "type", 1.0, None, 1.0, 0.0)
    units = [
        TensorParallelGroup(index, (replace(device, device_id=DeviceId(f"{node}:cpu{index}")),))
        for index, node in enumerate("aabcc")
    ]
    orders = [[unit.index for unit in placement[0]] for placement in node_orders(Placement([tuple(units)]))]
    assert sorted(orders) == sorted(
        [[2, 0, 1, 3, 4], [0, 1, 3, 4, 2], [3, 4, 2, 0, 1], [2, 3, 4, 0, 1], [3, 4, 0, 1, 2]]
    )
    assert not list(node_orders(Placement([tuple(units[:2])]))), "one node"


@given(st.integers(2, 6), st.integers(2, 5))
def test_staggered_replicas_keep_their_devices_and_leave_no_node_together(nodes, dp):
    """Each node has two pipeline ranks of every replica."""
    device = DeviceSpec(DeviceId("a:b"), "cpu", "type", 1.0, None, 1.0, 0.0)
    units = [
        TensorParallelGroup(index, (replace(device, device_id=DeviceId(f"node{index // (2 * dp)}:cpu{index}")),))
        for index in range(2 * dp * nodes)
    ]
    together = Placement(tuple(units[rank * dp + replica] for rank in range(2 * nodes)) for replica in range(dp))
    versions = list(staggered_replicas(together))
    for placement in versions:
        assert [set(row) for row in placement] == [set(row) for row in together]
        assert placement[0] == together[0]
        for row, other in itertools.pairwise(placement):
            for a, b in itertools.pairwise(zip(row, other, strict=True)):
                assert len({unit.node for unit in a}) > 1 or any(x.node == y.node for x, y in zip(a, b, strict=True))
    assert len(versions) == (2 if dp == 2 else 4)
