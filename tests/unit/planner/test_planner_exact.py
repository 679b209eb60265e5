"""The solvers against every plan there is, on clusters small enough to list them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import InputError
from hpctrain.bench.planner.search import gpus_of
from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import workload_of
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import Placement, make_tensor_parallel_groups
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.placement import all_placements
from hpctrain.planner.search.symmetry import PlacementSymmetry
from hpctrain.planner.simulate.engine import StageDurations, simulate, stage_ends
from hpctrain.planner.simulate.predict import predict
from hpctrain.schedule.generate import SCHEDULE_NAMES, make_schedule, why_no_schedule

pytestmark = pytest.mark.slow

SMALL = {"layers": 3, "dim": 128, "heads": 4}


def cuts_of(total, parts):
    """Ways to write a number as a sum, nothing left out."""
    return [cut for cut in itertools.product(range(total + 1), repeat=parts) if sum(cut) == total]


def fastest_of_all(run, topology):
    """Seconds of the fastest plan without tensor parallelism, found by trying each."""
    kinds = [MemoryOptions(), MemoryOptions(recompute="full"), *(MemoryOptions(zero=zero) for zero in (1, 2, 3))]
    return fastest_of(run, topology, kinds)


def fastest_of(run, topology, kinds):
    work, pool = workload_of(run, run.spec())[0], make_device_pool(run, topology)
    units = make_tensor_parallel_groups(pool, 1)
    best = float("inf")
    for memory_options, pp, dp in itertools.product(kinds, range(1, 4), range(1, 4)):
        if pp * dp > len(units) or (memory_options.zero and dp == 1):
            continue
        this = replace(work, memory_options=memory_options)
        cost = CostModel(this, pool.links)
        for chosen in itertools.permutations(units, pp * dp):
            placement = Placement(tuple(chosen[start : start + pp]) for start in range(0, pp * dp, pp))
            for schedule_spec, size in itertools.product(this.schedule_specs(pp), this.micro_batch_sizes()):
                stages = pp * schedule_spec.virtual_stages
                for counts, blocks in itertools.product(cuts_of(work.sequences // size, dp), cuts_of(3, stages)):
                    if (
                        not all(counts)
                        or not all(blocks[1:-1])
                        or (memory_options.equal_micro_batches and len(set(counts)) > 1)
                    ):
                        continue
                    if any(why_no_schedule(schedule_spec.name, pp, stages, count) for count in counts):
                        continue
                    layout = Layout(placement, schedule_spec.name, size, counts, blocks, memory_options)
                    if layout.memory_shortage(cost.memory) is None:
                        best = min(best, predict(cost, layout).total)
    return best


@pytest.mark.parametrize(
    ("speeds", "link"),
    [((1.0, 0.55), (5e-5, 1e-9)), ((1.0, 0.9, 0.3), (5e-6, 1e-10)), ((0.4, 1.0, 0.7), (1e-3, 1e-8))],
)
def test_exact_is_the_best_of_every_plan_and_auto_is_near(topology, run, speeds, link):
    asked, made = run(rows=4, dims=SMALL), topology(speeds, default=link)
    best = fastest_of_all(asked, made)
    exact = make_plan(asked, asked.spec(), made, PlanRequest(solver="exact"))
    assert exact.predicted.step_time_s["total"] == pytest.approx(best)
    assert exact.predicted.bound_s == pytest.approx(best)
    auto = make_plan(asked, asked.spec(), made).predicted
    assert auto.bound_s <= best * (1 + 1e-9)
    assert auto.step_time_s["total"] <= best * 1.01


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from([1.0, 0.8, 0.45]), min_size=1, max_size=3),
    st.sampled_from([(1e-6, 1e-11), (5e-5, 1e-9), (5e-3, 1e-7)]),
    st.sampled_from([5.6e8, 8e9]),
)
def test_no_plan_beats_the_bound(topology, run, speeds, link, memory):
    asked, made = run(rows=2, dims=SMALL), topology(speeds, default=link, memory=memory)
    bound = make_plan(asked, asked.spec(), made).predicted.bound_s
    assert bound <= fastest_of_all(asked, made) * (1 + 1e-9)


def test_what_is_too_much_for_every_plan_says_what_to_use(plan, topology):
    with pytest.raises(InputError, match=r"--solver exact: found 9 devices, allowed: up to 8; use --solver auto"):
        plan(topology([1.0] * 9), solver="exact")
    with pytest.raises(InputError, match=r"found more than 200000 plans that may be the fastest, allowed: up to 20"):
        plan(topology([1 - 0.1 * number for number in range(8)]), solver="exact", dims={"layers": 24})


def test_exact_tries_every_cut_of_a_deep_model_on_equal_nodes(plan, topology):
    made = topology([1.0] * 4, devices=2)
    exact, auto = (plan(made, solver=solver, rows=64, dims={"layers": 20}).predicted for solver in ("exact", "auto"))
    assert exact.step_time_s["total"] == pytest.approx(exact.bound_s)
    assert auto.bound_s <= exact.bound_s * (1 + 1e-9)
    assert exact.bound_s <= auto.step_time_s["total"] * (1 + 1e-9)


@pytest.mark.parametrize("rows", [32, 64])
def test_no_plan_whose_collectives_overlap_the_passes_beats_the_bound(run, rows):
    dims = {"layers": 24, "dim": 2048, "heads": 16, "vocab": 32000}
    asked = run(rows=rows, seq_len=1024, dims=dims, precision="bf16")
    exact = make_plan(asked, asked.spec(), gpus_of(8), PlanRequest(solver="exact"))
    auto = make_plan(asked, asked.spec(), gpus_of(8))
    assert exact.zero == 3, "the case has such a plan"
    assert auto.predicted.bound_s <= exact.predicted.bound_s * (1 + 1e-9)
    assert auto.predicted.step_time_s["total"] <= exact.predicted.bound_s * 1.01


@pytest.mark.parametrize("fields", [{}, {"racks": {(0, 1): 2.0}}, {"rails": 2}, {"links": {(0, 2): (1e-4, 4e-9)}}])
@pytest.mark.parametrize("dims", [(2, 2), (3, 1), (1, 3)])
def test_every_placement_is_equal_to_one_that_exact_tries(topology, run, fields, dims):
    pp, dp = dims
    made = topology((1.0, 1.0, 0.5), devices=2, **fields)
    asked = run(rows=12)
    work, pool = workload_of(asked, asked.spec())[0], make_device_pool(asked, made)
    cost, units = CostModel(work, pool.links), make_tensor_parallel_groups(pool, 1)
    symmetry = PlacementSymmetry(units, pool.links, work.stage_boundary_bytes(1))

    def step_s(placement: Placement) -> float:
        return round(predict(cost, Layout(placement, "1f1b", 1, (12 // dp,) * dp, (6 // pp,) * pp)).total, 12)

    every = {
        step_s(Placement(tuple(chosen[start : start + pp]) for start in range(0, pp * dp, pp)))
        for chosen in itertools.permutations(units, pp * dp)
    }
    tried = list(filter(symmetry.is_first_of_equals, all_placements(units, symmetry.classes, pp, dp)))
    assert {step_s(placement) for placement in tried} == every
    assert 2 * len(tried) < math.perm(len(units), pp * dp) / math.factorial(dp)


# Three ranks whose table repeats itself every second micro-batch; from `values` come forward, backward, send, back.
ODD = [1.0, 1.0, 0.5, 1.0, 1.0, 0.5, 1.0, 0.25, 1.0, 1.0]


@pytest.mark.parametrize("halves", [((), ()), ((0.5, 0.75), (1.0, 1.25)), ((0.5, 0.75), ())])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_one_rank_takes_the_time_of_its_table_also_without_times_of_split_passes(name, halves):
    stages = 1 if name in ("1f1b", "gpipe") else 2
    inputs, weights = (times[:stages] for times in halves)
    durations = StageDurations((0.25, 0.5)[:stages], (1.0, 2.0)[:stages], (0.0,), (0.0,), inputs, weights)
    line = simulate(make_schedule(name, 1, stages, 6), durations)
    ends = stage_ends(name, 1, stages, 6, durations)
    assert max(ends) == pytest.approx(line.makespan)
    assert ends == pytest.approx(line.stage_ends())


@settings(max_examples=40, deadline=None)
@example("1f1b", 3, 27, False, ODD)
@given(
    st.sampled_from(SCHEDULE_NAMES),
    st.integers(1, 4),
    st.integers(1, 60),
    st.booleans(),
    st.lists(st.floats(0.1, 1.0), min_size=40, max_size=40),
)
def test_fast_times_are_those_of_the_simulated_table(name, pp, count, blocking, values):
    stages = pp * (1 if name in ("1f1b", "gpipe") else 2)
    numbers = iter(values)

    def take(many):
        return tuple(next(numbers) for _ in range(many))

    durations = StageDurations(
        take(stages), take(stages), take(stages - 1), take(stages - 1),
        tuple(0.1 for _ in range(stages)), tuple(0.2 for _ in range(stages)), blocking,
    )  # fmt: skip
    line = simulate(make_schedule(name, pp, stages, count), durations)
    whole = stage_ends(name, pp, stages, count, durations, whole=True)
    ends = line.stage_ends()
    assert whole == pytest.approx([ends[stage] for stage in range(stages)])
    assert max(whole) == pytest.approx(max(line.rank_end(rank) for rank in range(pp)))
    short = stage_ends(name, pp, stages, count, durations)
    # Stages ten times as long as others, and messages as long as stages: 2.1 % is the most that was ever seen.
    assert max(short) == pytest.approx(max(whole), rel=0.05)
