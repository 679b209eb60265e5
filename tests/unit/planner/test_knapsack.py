"""The bound by columns against layouts made at random: what a layout does, the bound must allow."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import workload_of
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.layout import Layout, Option
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.simulate.predict import TimedLayout, predict
from hpctrain.records.plan.plan import ParallelDims

SAVINGS = (
    MemoryOptions(),
    MemoryOptions(),
    MemoryOptions(zero=1),
    MemoryOptions(zero=2),
    MemoryOptions(zero=3, recompute="full"),
)


def search_of(run, topology, memory_options=SAVINGS[0]):
    work, pool = workload_of(run, run.spec())[0], make_device_pool(run, topology)
    work = replace(work, memory_options=memory_options, framework=pool.framework)
    return SearchSpace(pool, CostModel(work, pool.links, pool.constants))


def parts_of(rng, total, parts, least):
    """`total` in so many random parts of at least `least` each; None where that cannot be."""
    if total < parts * least:
        return None
    counts = [least] * parts
    for _ in range(total - parts * least):
        counts[rng.randrange(parts)] += 1
    return tuple(counts)


def random_layout(search, rng):
    """Some devices in some order with some cut, share of the batch, micro-batch and schedule."""
    pp, dp, tp = rng.choice(search.candidate_dims)
    size, schedule_spec = rng.choice(search.work.micro_batch_sizes()), rng.choice(search.work.schedule_specs(pp))
    units, stages = search.units(tp), pp * schedule_spec.virtual_stages
    option = Option(ParallelDims(pp, dp, tp), schedule_spec, size)
    if (search.work.memory_options.zero and dp == 1) or search.why_no_layout(option):
        return None
    middle = parts_of(rng, search.work.spec.layers, stages, 1)
    if middle is None:
        return None
    blocks = list(middle)
    if stages > 2 and rng.random() < 0.4:  # the ends may be without a block
        blocks[1], blocks[0] = blocks[1] + blocks[0], 0
    total = search.work.sequences // size
    counts = (total // dp,) * dp if search.work.memory_options.equal_micro_batches else parts_of(rng, total, dp, 1)
    chosen = rng.sample(units, pp * dp)
    placement = Placement(tuple(chosen[start : start + pp]) for start in range(0, pp * dp, pp))
    return Layout(placement, schedule_spec.name, size, counts, tuple(blocks), search.work.memory_options)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from([1.0, 0.9, 0.6, 0.3]), min_size=2, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(1e-6, 1e-11), (5e-5, 1e-9), (5e-3, 1e-7)]),
    st.sampled_from([5.6e8, 6.5e8, 8e9]),
    st.sampled_from(SAVINGS),
    st.sampled_from([1, 16]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.integers(0, 2**32),
)
def test_no_layout_ends_before_the_bound(
    topology, run, speeds, devices, link, memory, memory_options, wide, rails, ratio, seed
):
    """Also where messages share cards and uplinks, or where devices have cards of their own."""
    asked = run(rows=12, seq_len=32 * wide, dims={"layers": 7, "dim": 64 * wide})
    half = len(speeds) // 2
    racks = {tuple(range(half)): ratio, tuple(range(half, len(speeds))): ratio}
    made = topology(speeds, devices=devices, default=link, memory=memory, racks=racks, rails=rails)
    search = search_of(asked, made, memory_options)
    rng = random.Random(seed)
    for number in range(15):
        layout = random_layout(search, rng)
        if layout is None or layout.memory_shortage(search.cost.memory):
            continue
        took = predict(search.cost, layout, whole=True).total
        assert TimedLayout(search.cost, layout).bound_s <= took * (1 + 1e-9)
        option = layout.option
        assert search.bounds.step_s(option) <= took * (1 + 1e-9)
        knapsack_bound = search.bounds.knapsack(option)
        assert knapsack_bound.may_finish_within(took * (1 + 1e-9))
        if number < 3:
            assert knapsack_bound.bracket(0.0, 2 * took)[0] <= took * (1 + 1e-9)
