"""What simultaneous messages share: by hand, and against a simulation in which flows share every card fairly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fair_flows import capacities, node_ports, pipelines_end_s
from hypothesis import given, settings
from hypothesis import strategies as st
from topologies_made import run_of, topology_of

from hpctrain.planner import make_plan
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import workload_of
from hpctrain.planner.devices.contention import SharedPorts
from hpctrain.planner.devices.placement_links import PlacementLinks
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import Placement, make_tensor_parallel_groups
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.card_sharing import CardSharing, SumWindow
from hpctrain.planner.simulate.engine import StageDurations, delayed_stage_ends, simulate, stage_ends
from hpctrain.planner.simulate.gradient_sums import (
    StageSum,
    rank_sums,
    settle_sums,
    shard_collective_seconds,
    stage_sums,
    sums_beside_messages,
)
from hpctrain.planner.simulate.predict import TimedLayout, predict, simulate_step
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.schedule import Action
from hpctrain.schedule.generate import make_schedule

BETA = 1e-8
PAIRS = {(0, 1): 2.0, (2, 3): 2.0}


def placement_of(pool, nodes, dp, tp=1):
    """The placement of `dp` replicas whose groups lie on these nodes, stage by stage."""
    free = {}
    for unit in make_tensor_parallel_groups(pool, tp):
        free.setdefault(unit.node, []).append(unit)
    units = [free[f"local{node}"].pop(0) for node in nodes]
    return Placement(tuple(units[replica::dp]) for replica in range(dp))


def scene_of(run, made, nodes, dp, schedule="1f1b", count=4, **dims):
    asked = run(dims={"layers": 8, "dim": 256, "vocab": 320} | dims, seq_len=256, rows=2 * count * dp)
    work, pool = workload_of(asked, asked.spec())[0], make_device_pool(asked, made)
    placement = placement_of(pool, nodes, dp)
    stages = len(placement[0]) * (2 if schedule == "interleaved_1f1b" else 1)
    blocks = tuple(8 // stages + (stage < 8 % stages) for stage in range(stages))
    return CostModel(work, pool.links), Layout(placement, schedule, 2, (count,) * dp, blocks, work.memory_options)


@pytest.mark.parametrize(
    ("nodes", "racks", "factors"),
    [
        ((0, 1, 2, 3), None, (1, 1)),  # each replica on nodes of its own
        ((0, 0, 1, 1), None, (2, 2)),  # two senders and two receivers
        ((0, 0, 1, 2), None, (2, 2)),  # two senders
        ((0, 1, 2, 2), None, (2, 2)),  # two receivers
        ((0, 0, 0, 1), None, (None, 1)),  # the first replica stays within its node
        ((0, 1, 1, 0), None, (1, 1)),  # one forward, and one the other way
        ((0, 1, 2, 3), PAIRS, (2, 2)),  # both nodes of a rack send to the other rack
        ((0, 2, 1, 3), PAIRS, (1, 1)),  # messages stay within racks
        ((0, 2, 2, 3), PAIRS, (1, 1)),  # one of them leaves its rack
        ((0, 0, 2, 2), PAIRS, (2, 2)),  # half of the rack's nodes, with two messages, which share their cards anyway
        ((0, 1, 2, 3), {(0, 1): 8.0}, (2, 2)),  # a message alone has the whole uplink
        ((0, 1, 2, 3), {(0, 1): None}, (1, 1)),  # a cluster that was never measured
    ],
)
def test_messages_of_replicas_share_cards_and_uplinks(topology, run, nodes, racks, factors):
    cost, layout = scene_of(run, topology((1,) * 4, devices=4, default=(0.0, BETA), racks=racks), nodes, 2)
    size = cost.work.message_bytes(layout.micro_batch, 1, "none")
    for replica, factor in enumerate(factors):
        if factor is None:
            continue
        for ends in ((0, 1), (1, 0)):
            seconds = cost.stage_message_s(layout.placement, replica, *ends, layout.micro_batch, "none")
            assert seconds == pytest.approx(factor * BETA * size)


def test_devices_with_cards_of_their_own_share_nothing(topology, run):
    """Two cards a node, one for every second device: two of four messages share one."""
    for rails, factor in ((0, 4), (2, 2), (4, 1)):
        made = topology((1, 1), devices=4, default=(0.0, BETA), rails=rails)
        pool = make_device_pool(run(), made)
        links = PlacementLinks(placement_of(pool, (0,) * 4 + (1,) * 4, 4), pool.links)
        assert links.message_alpha_beta(0, 0, 1) == pytest.approx((0.0, factor * BETA))
        (group,) = PlacementLinks(placement_of(pool, (0, 1) * 4, 8), pool.links).replicate_ring_groups(1, False)
        # A ring that visits the nodes in turns leaves each four times, over all of its cards.
        assert group.costs[0][2] == pytest.approx(4 / max(rails, 1) * BETA)


def test_rings_share_uplinks(topology, run):
    """Two rings over two racks, one for each stage: each crosses each uplink once in each direction."""
    for racks, factor in ((None, 1), (PAIRS, 2), ({(0, 1): 1.5, (2, 3): 1.5}, 1.5)):
        made = topology((1,) * 4, default=(0.0, BETA), racks=racks)
        pool = make_device_pool(run(), made)
        links = PlacementLinks(placement_of(pool, (0, 2, 1, 3), 2), pool.links)
        for group in links.replicate_ring_groups(1, False):
            assert group.costs[0][2] == pytest.approx(factor * BETA)


def test_all_to_alls_share_uplinks(topology, run):
    pool = make_device_pool(run(), topology((1,) * 4, default=(0.0, BETA), racks=PAIRS))
    links = PlacementLinks(placement_of(pool, (0, 1, 2, 3), 4), pool.links)
    (group,) = links.replicate_ring_groups(1, True)
    for further in ({}, {"pairs": True}):
        with pytest.raises(TypeError):
            links.replicate_ring_groups(1, **further)  # the same rings would be computed again, under another key
    # Each rack sends 2·2/4 of its tensors to the other one, a ring's hop 3/4; the uplink carries one message of two.
    assert group.costs[0][2] == pytest.approx(4 / 3 * BETA)


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=9), min_size=1, max_size=3))
def test_loads_are_those_of_messages_counted_one_by_one(groups):
    """Groups of devices on four nodes in two racks: n−1 messages of a part to the next device in a ring, and one to
    each other device in an all-to-all."""
    ports = SharedPorts(topology_of((1,) * 4, racks={(0, 1): 2.0, (2, 3): 1.5}))
    parts = {("uplink", "rack0"): 1.0, ("uplink", "rack1"): 0.75}
    rings, everyone = Counter(), Counter()
    groups = [[DeviceId.of(f"local{node}", f"cuda{at}") for at, node in enumerate(group)] for group in groups]
    for group in groups:
        n = len(group)
        for at, source in enumerate(group):
            for step, target in enumerate([*group[at + 1 :], *group[:at]]):
                passed = [("card", source.node)] if source.node != target.node else []
                rack, other = (device_id.node in ("local2", "local3") for device_id in (source, target))
                passed += [("uplink", f"rack{rack:d}")] * (rack != other)
                for port in passed:
                    part = parts.get(port, 1.0)
                    # A load of 1 is a hop of a ring: n−1 messages.
                    everyone[port] += part / (n - 1)
                    rings[port] += part if step == 0 else 0
    assert ports.ring_load(groups) == pytest.approx({port: load for port, load in rings.items() if load})
    assert ports.all_to_all_load(groups) == pytest.approx(dict(everyone))


def test_groups_across_nodes_share_uplinks(topology, run):
    """Two tensor-parallel groups, each across both racks."""
    links = {(0, 2): (0.0, BETA / 2), (1, 3): (0.0, BETA / 2)}
    for racks, factor in ((None, 1), (PAIRS, 2)):
        made = topology((1,) * 4, default=(0.0, BETA), links=links, racks=racks)
        groups = make_tensor_parallel_groups(make_device_pool(run(), made), 2)
        assert {tuple(device.node for device in group.devices) for group in groups} == {
            ("local0", "local2"),
            ("local1", "local3"),
        }
        assert [group.contention for group in groups] == [factor] * 2


def test_a_tied_embedding_is_summed_by_all_replicas_at_once(topology, run):
    times = []
    for nodes in ((0, 1, 2, 3), (0, 0, 1, 1)):
        cost, layout = scene_of(run, topology((1,) * 4, devices=2, default=(0.0, BETA)), nodes, 2, tied=True)
        times.append(cost.tied_all_reduce_s(layout.placement, 0, 1))
    assert times[1] == pytest.approx(2 * times[0])
    assert times[0] > 0


def test_a_cluster_with_fewer_nodes_keeps_its_uplink(topology):
    made = topology((1,) * 5, racks={(0, 1, 2, 3): 4.0, (4,): 1.0})
    (left, alone) = made.only(["local0", "local1", "local4"]).fabric.clusters
    assert (left.members, left.oversubscription, alone.oversubscription) == (["local0", "local1"], 2.0, 1.0)


LAYOUTS = {
    "stages on nodes of their own": ((0, 0, 1, 1), 2, None),
    "three replicas": ((0, 0, 0, 1, 1, 1), 3, None),
    "one replica runs the other way": ((0, 1, 1, 0), 2, None),
    "two replicas run the other way": ((0, 0, 1, 1, 1, 1, 0, 0), 4, None),
    "two stages on a node": ((0, 0, 0, 0, 1, 1, 1, 1), 2, None),
    "racks": ((0, 1, 2, 3), 2, PAIRS),
    "racks and two replicas a node": ((0, 0, 1, 1, 2, 2, 3, 3), 4, PAIRS),
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b"])
@pytest.mark.parametrize("beta", [1e-9, 3e-8, 1e-7, 1e-6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_are_those_of_flows_that_share_fairly(topology, run, name, beta, schedule):
    """From messages that hardly matter to messages that take 8 to 16 times as long as a forward."""
    nodes, dp, racks = LAYOUTS[name]
    made = topology((1,) * 4, devices=4, default=(0.0, beta), racks=racks)
    cost, layout = scene_of(run, made, nodes, dp, schedule, count=8)
    members = [{f"local{node}" for node in rack} for rack in racks or ()]
    ports = capacities([node.id for node in made.nodes], 1 / beta, members, 2 / 2.0 / beta)
    fair = pipelines_end_s(cost, layout, node_ports(members), ports)
    step, prediction = simulate_step(cost, layout), predict(cost, layout, whole=True)
    pipelines = prediction.total - prediction.terms["optimizer"] - prediction.terms["data_parallel"]
    assert pipelines == pytest.approx(fair, rel=0.15)
    assert max(map(step.all_reduced_at, range(layout.pp))) + step.update == pytest.approx(prediction.total)


def test_messages_that_take_no_time_delay_nothing(topology, run):
    """Six unlike stages on three nodes: the ranks of a node end their actions in no fixed order."""
    made = topology((1,) * 3, devices=4, default=(0.0, 1e-15))
    cost, layout = scene_of(run, made, (0,) * 4 + (1,) * 4 + (2,) * 4, 2, count=24)
    layout = replace(layout, blocks=(1, 1, 2, 2, 1, 1))
    prediction = predict(cost, layout, whole=True)
    pipelines = prediction.total - prediction.terms["optimizer"] - prediction.terms["data_parallel"]
    fair = pipelines_end_s(cost, layout, node_ports(), capacities([node.id for node in made.nodes], 1e15))
    assert pipelines == pytest.approx(fair, rel=1e-3)


def test_messages_on_the_way_do_not_delay_the_next_one():
    """Four micro-batches forward, each sent in 1 s, of which 0.75 s are latency."""
    table = make_schedule("gpipe", 2, 2, 4)
    for latency in (0.0, 0.75):
        durations = StageDurations((0.1, 0.0), (0.0, 0.0), (1.0,), (0.0,), lanes=(0, 1), latency=(latency, 0.0))
        starts = {action: start for action, start, _ in simulate(table, durations).spans[1]}
        # The first one is sent at 0.1 s.
        assert starts[Action(1, "F", 3)] == pytest.approx(0.1 + 1 + 3 * (1 - latency))


def test_a_slow_network_keeps_pipelines_within_nodes(topology, run):
    """Two nodes of two devices: pipelines across nodes would send twice as many messages at once as one alone."""
    made = topology((1, 1), devices=2, default=(1e-5, 1e-7))
    asked = run(
        rows=128, seq_len=256, dims={"layers": 4, "dim": 64},
        parallel={"mode": "fixed", "pp": 2, "dp": 2, "schedule": "1f1b", "micro_batch": 2},
    )  # fmt: skip
    plan = make_plan(asked, asked.spec(), made)
    for replica in range(2):
        (first,), (second,) = plan.pipeline_rank_devices(replica)
        assert first.node == second.node


@st.composite
def hybrids(draw):
    """Nodes of the units of two pipelines, stage by stage; schedule, micro-batches, alpha and beta of links, width."""
    pp = draw(st.integers(2, 3))
    nodes = tuple(draw(st.lists(st.integers(0, 3), min_size=2 * pp, max_size=2 * pp)))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b"]))
    link = draw(st.sampled_from([0.0, 2e-4])), 10 ** draw(st.floats(-10, -6.5))
    return nodes, schedule, pp * draw(st.integers(1, 8)), link, draw(st.sampled_from([64, 256]))


def ends_and_delays(cost, layout):
    """[replica] -> its stage ends without sums, and the function that delays them, as `settle_sums` wants it."""
    durations = simulate_step(cost, layout).durations_by_replica
    table = layout.schedule, layout.pp, len(layout.blocks), layout.micro_batches[0]
    alone = [stage_ends(*table, run, whole=True) for run in durations]

    def delayed(number, sharing):
        ends = delayed_stage_ends(*table, durations[number], alone[number], sharing, whole=True)
        assert all(end >= before - 1e-12 for end, before in zip(ends, alone[number], strict=True))
        return ends

    return alone, delayed


@pytest.mark.parametrize("nodes", [(0, 1, 2, 3), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b"])
@pytest.mark.parametrize("beta", [1e-8, 1e-7])
def test_early_sums_take_as_long_as_flows_that_share_cards_fairly(topology, nodes, schedule, beta):
    """Each stage has nodes of its own. Without sums, pipelines of three stages are predicted up to 10 % too short."""
    made = topology((1,) * 6, default=(0.0, beta))
    cost, layout = scene_of(run_of, made, nodes, 2, schedule, len(nodes))
    sums = stage_sums(cost, layout, shard_collective_seconds(cost, layout))
    sums = [stage._replace(hidden_s=0.0, late_s=0.0) for stage in sums]
    sent = cost.all_reduce_times(layout.placement, layout.model_parts, layout.rank_of_stage)
    wires = node_ports(), capacities([f"local{node}" for node in nodes], 1 / beta)
    fair = pipelines_end_s(cost, layout, *wires, [stage.sent_bytes for stage in sent])
    alone, delayed = ends_and_delays(cost, layout)
    early = sums_beside_messages(cost, layout, sums, alone, range(2), delayed).end_s
    assert early == pytest.approx(fair, rel=0.04)
    unshared = max(rank.end_s for rank in rank_sums(layout, sums, alone))
    assert abs(early / fair - 1) <= abs(unshared / fair - 1) + 0.01


@given(hybrids())
@settings(max_examples=60, deadline=None)
def test_sums_beside_stage_messages_share_their_cards(case):
    nodes, schedule, count, link, dim = case
    topology = topology_of((1,) * 4, devices=6, default=link)
    cost, layout = scene_of(run_of, topology, nodes, 2, schedule, count, dim=dim, vocab=2048)
    sums, stages = stage_sums(cost, layout, shard_collective_seconds(cost, layout)), len(layout.blocks)
    step, total = simulate_step(cost, layout), predict(cost, layout, whole=True).total
    assert max(map(step.all_reduced_at, range(layout.pp))) + step.update == pytest.approx(total)
    timed, prediction = TimedLayout(cost, layout), predict(cost, layout)
    assert timed.bound_s <= total * (1 + 1e-9)
    assert prediction.total == pytest.approx(total, rel=0.05)
    assert sum(prediction.terms.values()) == pytest.approx(2 * prediction.total), "the terms, and their sum"
    below = timed.predict_below(prediction.total * (1 + 1e-9))
    assert below is not None
    assert below.total == prediction.total
    assert timed.predict_below(prediction.total) is None, "a step that is not shorter"
    for replica in range(layout.dp):
        known = TimedLayout(cost, layout, prediction.times)
        assert known.predict_below(prediction.total * (1 + 1e-9), replica).total == prediction.total
        assert known.predict_below(prediction.total, replica) is None, "whichever replica is simulated first"
    more = replace(layout, micro_batches=(layout.pp + layout.micro_batches[0], *layout.micro_batches[1:]))
    assert TimedLayout(cost, more, prediction.times).predict().total == predict(cost, more).total
    fewer = replace(layout, blocks=(layout.blocks[0] - 1, layout.blocks[1] + 1, *layout.blocks[2:]))
    assert TimedLayout(cost, fewer, prediction.times).predict().total == predict(cost, fewer).total
    alone, delayed = ends_and_delays(cost, layout)
    settled = settle_sums(cost, layout, sums, alone, range(layout.dp), delayed)
    early = rank_sums(layout, sums, alone)
    late = rank_sums(layout, [stage.begun_late() for stage in sums], alone)
    least, most = (max(rank.end_s for rank in ranks) for ranks in (early, late))
    assert least - 1e-12 <= settled.end_s <= most, "workers keep what is faster"
    nothing = settle_sums(cost, layout, [StageSum(0.0, 0.0, 0.0)] * stages, alone, range(layout.dp), delayed)
    assert (nothing.ends, nothing.end_s) == (alone, max(map(max, alone)))
    assert predict(cost, layout, whole=True).late_sums == settled.are_late == (settled.end_s == most)


def test_messages_between_two_sums_of_a_rank_have_the_card_to_themselves():
    """The second of two stages of a rank ends long after the sum of the first one."""
    layout = SimpleNamespace(stages_by_rank=[[0, 1], [2]])
    sums = [StageSum(1.0, 0.5, 0.25), StageSum(2.0, 0.0, 0.0), StageSum(0.0, 0.0, 4.0)]
    first, second = rank_sums(layout, sums, [[8.0, 3.0, 2.0], [7.0, 2.0, 2.5]], [0.125, 0.0])
    assert first == ((SumWindow(3.0, 5.0), SumWindow(7.5, 8.625)), 3.0, 8.875)
    assert second == ((), 2.5, 6.5)


def test_a_message_takes_twice_as_long_beside_one_sum(topology):
    """The sums of both ends pass cards of their own, so together they delay a message as much as one of them."""
    cost, layout = scene_of(run_of, topology((1,) * 4, default=(0.0, 1e-8)), (0, 1, 2, 3), 2)
    links = cost.placement_links(layout.placement)

    def sent(*windows, begin=10.0, seconds=4.0):
        cards = CardSharing(links, 0, layout.rank_of_stage, [[SumWindow(*window)] for window in windows], (0, 1))
        return cards.sent_s(1, begin, seconds), [cards.carried_s(rank) for rank in (0, 1)]

    assert sent((0, 9), (14, 20)) == (14.0, [0.0, 0.0]), "before and after it"
    assert sent((0, 12), (0, 0)) == (15.0, [1.0, 0.0])
    assert sent((0, 12), (0, 14)) == (16.0, [1.0, 2.0])
    assert sent((11, 13), (0, 0)) == (15.0, [1.0, 0.0])
    assert sent((0, 99), (11, 99)) == (18.0, [4.0, 3.5])
