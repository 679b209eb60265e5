"""Plans for topologies made by hand: what a person would choose is what comes out."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.base.package_data import package_data_path
from hpctrain.bench.planner.search import MIXED_CASES, scene_of_case
from hpctrain.planner import make_plan
from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ScheduleSpec, workload_of
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.layout import Option
from hpctrain.planner.layout.partition import fit_layout
from hpctrain.planner.layout.placement import rank_permutations, staggered_replicas
from hpctrain.planner.search.evaluate import best_of, evaluate, refine
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.simulate.predict import TimedLayout, predict
from hpctrain.records.plan.plan import ParallelDims, Plan
from hpctrain.records.run.run import FixedParallel
from hpctrain.records.topology.topology import Topology
from hpctrain.schedule.resolve import check_schedule, schedule_of

PIPELINE = {"mode": "fixed", "pp": 2, "schedule": "1f1b"}
REPLICAS = {"mode": "fixed", "dp": 2}


def nodes_of(row):
    return [place.node for stage in row for place in stage]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_a_plan_is_whole_and_its_terms_add_up(plan, topology, nodes):
    made = plan(topology([1.0] * nodes))
    assert made.sequences == 16
    assert made.layers == 6
    for replica in range(made.dp):
        table, note = schedule_of(made, replica)
        assert note is None
        check_schedule(table, len(made.stages), made.replicas[replica].micro_batches)
    terms = made.predicted.step_time_s
    assert sum(value for term, value in terms.items() if term != "total") == pytest.approx(terms["total"])
    assert min(terms.values()) >= 0
    assert 0 < made.predicted.bound_s <= terms["total"]
    assert set(made.predicted.memory_bytes) == set(made.ranks)
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.slow
def test_the_same_input_gives_the_same_plan(plan, topology):
    speeds = (1.0, 0.7, 1.0, 0.4)
    assert plan(topology(speeds)).to_json() == plan(topology(speeds)).to_json()


def test_more_devices_are_used_only_where_they_help(plan, topology):
    slow = plan(topology((1, 1), default=(0.5, 1e-5)))
    assert slow.world_size == 1
    assert "1 of 2 usable devices stay idle." in slow.notes
    assert plan(topology((1, 1))).world_size == 2


def test_the_slow_device_gets_fewer_blocks(plan, topology):
    made = plan(topology((1.0, 0.25)), parallel=PIPELINE)
    blocks = {nodes_of([row])[0]: stage.layers[1] - stage.layers[0]
              for stage, row in zip(made.stages, made.replicas[0].devices, strict=True)}  # fmt: skip
    assert blocks["local0"] > 2 * blocks["local1"]


def test_the_slow_device_gets_fewer_rows(plan, topology):
    made = plan(topology((0.25, 1.0)), parallel=REPLICAS)
    rows = {nodes_of(replica.devices)[0]: replica.sequences for replica in made.replicas}
    assert rows["local1"] > 2 * rows["local0"]
    assert sum(rows.values()) == 16


def test_a_slow_link_is_no_stage_boundary_where_another_order_avoids_it(plan, topology):
    slow = {(0, 1): (0.02, 1e-7)}
    made = plan(topology((1, 1, 1), links=slow), parallel={"mode": "fixed", "pp": 3, "schedule": "1f1b"})
    order = nodes_of(made.replicas[0].devices)
    assert order[1] == "local2", "the node that both others reach fast stands between them"
    listed = next(entry for entry in made.rejected if entry.change == "devices in the order of the topology file")
    assert listed.delta_s > 0.02
    assert "pipeline_send" in listed.reason


def test_a_slow_node_is_left_out_of_the_sums(plan, topology):
    far = {(0, 2): (0.5, 1e-5), (1, 2): (0.5, 1e-5)}
    assert "local2" not in plan(topology((1, 1, 1), links=far)).nodes


def test_no_order_of_devices_beats_the_chosen_one(topology, run):
    asked = run(parallel={"mode": "fixed", "pp": 3, "schedule": "1f1b", "micro_batch": 2})
    made = topology((1.0, 0.6, 0.3), links={(0, 1): (2e-3, 1e-8), (1, 2): (1e-4, 1e-9), (0, 2): (4e-3, 1e-8)})
    (work, _), pool = workload_of(asked, asked.spec()), make_device_pool(asked, made)
    search = SearchSpace(pool, CostModel(work, pool.links))
    totals = []
    for placement in search.placements(ParallelDims(3, 1, 1)):
        layout = fit_layout(search.cost, placement, ScheduleSpec("1f1b"), 2)
        prediction = predict(search.cost, layout)
        assert TimedLayout(search.cost, layout).bound_s <= prediction.total * (1 + 1e-9)
        totals.append(prediction.total)
    assert len(totals) == 6
    assert make_plan(asked, asked.spec(), made).predicted.step_time_s["total"] <= min(totals)


def test_of_many_devices_no_exchange_of_pipeline_ranks_beats_the_chosen_order(run):
    """The paper's cluster: its mixed nodes belong at the front of a pipeline; the order by speed has them last."""
    made = Topology.read(package_data_path("topology", "paper-32-gpu.json"))
    dims = {"layers": 12, "dim": 1024, "heads": 16, "vocab": 32000}
    fixed = {"mode": "fixed", "pp": 4, "dp": 8, "schedule": "interleaved_zero_bubble", "micro_batch": 16}
    asked = run(rows=512, seq_len=512, precision="fp16", dims=dims, parallel=fixed)
    (work, _), pool = workload_of(asked, asked.spec()), make_device_pool(asked, made)
    search = SearchSpace(pool, CostModel(work, pool.links))
    best = best_of(search, search.options(search.candidate_dims, [16]))
    refined = refine(search, best)
    assert refined.total < best.total
    for placement in rank_permutations(refined.layout.placement):
        other = predict(search.cost, fit_layout(search.cost, placement, ScheduleSpec("interleaved_zero_bubble"), 16))
        assert other.total >= refined.total


def search_of(asked, made, **fields):
    """Args: fields: fields of the workload."""
    (work, _), pool = workload_of(asked, asked.spec()), make_device_pool(asked, made)
    return SearchSpace(pool, CostModel(replace(work, framework=pool.framework, **fields), pool.links, pool.constants))


def test_after_local_search_a_block_of_any_stage_is_no_better_in_another_one():
    """With moves between neighbouring stages alone, this search would end with a longer step."""
    asked, made = scene_of_case(next(case for case in MIXED_CASES if case.machines == "mixed-8x8-1GBs"))
    fixed = FixedParallel(mode="fixed", pp=8, dp=1, tp=1, schedule="1f1b", micro_batch=1)
    search = search_of(asked.model_copy(update={"parallel": fixed}), made)
    refined = refine(search, best_of(search, search.options(search.candidate_dims)))
    blocks = refined.layout.blocks
    for giver, taker in permutations(range(8), 2):
        if blocks[giver] > (giver not in (0, 7)):
            moved = tuple(count - (stage == giver) + (stage == taker) for stage, count in enumerate(blocks))
            other = replace(refined.layout, blocks=moved)
            if other.memory_shortage(search.cost.memory) is None:
                assert predict(search.cost, other).total >= refined.total * (1 - 1e-6)


def test_a_placement_has_room_if_the_blocks_fit_its_devices():
    """On these 64 GPUs of five kinds, few placements of most degrees fit; those that are tried first do not."""
    asked, made = scene_of_case(next(case for case in MIXED_CASES if case.name == "mixed-64x5-12.5GBs-1.3B-512"))
    search, rare = search_of(asked, made, memory_options=MemoryOptions(zero=1)), 0
    for dims, size in (((2, 32, 1), 2), ((4, 16, 1), 4), ((8, 8, 1), 4), ((4, 16, 1), 1), ((2, 32, 1), 4)):
        option = Option(ParallelDims(*dims), ScheduleSpec("1f1b"), size)
        likely = search.placements(option.dims)
        fits = [
            search.fit_layout(placement, option).memory_shortage(search.cost.memory) is None for placement in likely
        ]
        assert [search.has_room(placement, option) for placement in likely] == fits
        rare += any(fits) and not fits[0] and not fits[-1]
    assert rare


@pytest.mark.slow
def test_where_messages_take_long_replicas_leave_nodes_at_different_ranks():
    """Without staggered replicas, messages take over a third of this step, because both replicas share each card."""
    asked, made = scene_of_case(next(case for case in MIXED_CASES if case.machines == "mixed-32x3-3GBs"))
    fixed = FixedParallel(mode="fixed", pp=10, dp=2, tp=1, schedule="gpipe", micro_batch=1, zero=1)
    asked = asked.model_copy(update={"parallel": fixed})
    (work, _), pool = workload_of(asked, asked.spec()), make_device_pool(asked, made)
    search = SearchSpace(pool, CostModel(work, pool.links))
    (option,) = search.options(search.candidate_dims)
    aligned = search.placements(option.dims)
    staggered = [other for placement in aligned for other in staggered_replicas(placement)]
    best = evaluate(search, option, None, staggered).best
    assert refine(search, best).total < refine(search, evaluate(search, option, None, aligned).best).total
    plan = make_plan(asked, asked.spec(), made)
    assert plan.predicted.step_time_s["total"] <= refine(search, best).total * (1 + 1e-6)


def test_pipeline_ranks_take_their_blocks_along_when_they_change_places(topology, run):
    fixed = {"mode": "fixed", "pp": 5, "schedule": "interleaved_1f1b", "micro_batch": 1}
    asked = run(dims={"layers": 22}, parallel=fixed)
    (work, _), pool = workload_of(asked, asked.spec()), make_device_pool(asked, topology((1.0, 0.9, 0.7, 0.5, 0.35)))
    search = SearchSpace(pool, CostModel(work, pool.links))
    refined = refine(search, best_of(search, search.options(search.candidate_dims)))
    (row,), blocks = refined.layout.placement, refined.layout.blocks
    for other in range(1, 5):
        ranks = [{0: other, other: 0}.get(rank, rank) for rank in range(5)]
        exchanged = replace(
            refined.layout,
            placement=Placement([tuple(row[rank] for rank in ranks)]),
            blocks=tuple(blocks[rank + first] for first in (0, 5) for rank in ranks),
        )
        assert refine(search, predict(search.cost, exchanged)).total <= refined.total * (1 + 1e-9), other


def test_other_degrees_are_no_faster_than_the_chosen_ones(plan, topology):
    speeds = (1.0, 0.8, 0.5)
    best = plan(topology(speeds)).predicted.step_time_s["total"]
    for pp, dp, tp in ((1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 3, 1)):
        fixed = plan(topology(speeds), parallel={"mode": "fixed", "pp": pp, "dp": dp, "tp": tp})
        assert (fixed.pp, fixed.dp, fixed.tp) == (pp, dp, tp)
        # With fixed degrees, all of the annealing is for these degrees.
        assert fixed.predicted.step_time_s["total"] >= 0.99 * best, (pp, dp, tp)


def test_fixed_choices_are_kept(plan, topology):
    chosen = {"mode": "fixed", "pp": 2, "dp": 2, "tp": 1, "micro_batch": 4, "schedule": "gpipe"}
    made = plan(topology([1.0] * 5), parallel=chosen)
    assert (made.pp, made.dp, made.tp, made.schedule) == (2, 2, 1, "gpipe")
    assert {replica.micro_batch for replica in made.replicas} == {4}


def test_interleaved_stages_lie_on_the_ranks_in_turn(plan, topology):
    made = plan(topology(), parallel={"mode": "fixed", "pp": 2, "schedule": "interleaved_1f1b"})
    assert len(made.stages) == 4
    assert made.stage_owner() == {0: 0, 1: 1, 2: 0, 3: 1}


def test_tensor_parallelism_stays_within_a_node(plan, topology):
    made = plan(topology((1, 1), devices=2), parallel={"mode": "fixed", "tp": 2, "dp": 2})
    assert all(len({place.node for place in row}) == 1
               for replica in made.replicas for row in replica.devices)  # fmt: skip
    across = plan(topology((1, 1)), parallel={"mode": "fixed", "tp": 2})
    assert across.nodes == ["local0", "local1"]


def test_rejected_neighbours_say_why(plan, topology):
    made = plan(topology((1, 1, 1)))
    reasons = {entry.change: entry for entry in made.rejected}
    assert reasons["pp 1 × dp 1 × tp 3"].reason == "heads 4 is not a multiple of tp 3"
    assert reasons["pp 1 × dp 1 × tp 3"].delta_s is None
    assert reasons["pp 1 × dp 1 × tp 1"].delta_s > 0
    assert any(change.startswith("micro-batch ") for change in reasons)
    assert all(entry.delta_s is None or entry.delta_s >= 0 for entry in made.rejected)


def test_spares_excluded_nodes_and_extra_devices_are_left_out(plan, topology):
    made = plan(topology((1.0, 0.5, 1.0, 1.0), exclude=["local3"]), recovery={"spares": 1})
    assert set(made.nodes) <= {"local0", "local2"}
    assert "Left out on the probe's advice: local3." in made.notes
    assert "Kept idle as spares: local1." in made.notes
    single = plan(topology((1, 1), devices=4, kind="cuda"), cluster={"devices_per_node": 1})
    assert {place.device for place in single.ranks} == {"cuda0"}


def test_a_plan_uses_at_most_one_end_of_a_link_that_could_not_be_measured(plan, topology):
    def cut(*pairs, **fields):
        whole = topology((1.0, 1.0, 1.0, 1.0), **fields)
        return whole.model_copy(update={"fabric": whole.fabric.model_copy(update={"broken": list(pairs)})})

    made = plan(cut(("local0", "local2"), ("local1", "local2")))
    assert set(made.nodes) <= {"local0", "local1", "local3"}
    why = "Left out because the probe could not measure links between them and others: local2."
    assert why in made.notes
    # A node that is left out anyway takes no other with it.
    other = plan(cut(("local0", "local3"), exclude=["local0"]))
    assert set(other.nodes) == {"local1", "local2", "local3"}


def test_missing_bf16_stands_back_for_fp32_with_a_note(plan, topology):
    made = plan(topology(), precision="bf16")
    assert any("bf16 was not measured" in note for note in made.notes)


def test_unmeasured_memory_is_said(plan, topology):
    made = plan(topology((1,), memory=None))
    assert made.notes == ["The memory of local0:cpu0 was not measured, so nobody checked that the plan fits it."]


def test_memory_limits_shape_the_plan(plan, topology):
    free = plan(topology((1, 1), memory=8e9), rows=64, seq_len=256, parallel=PIPELINE)
    tight = plan(topology((1, 1), memory=3.93e8), rows=64, seq_len=256, parallel=PIPELINE)
    assert max(tight.predicted.memory_bytes.values()) <= 0.9 * 3.93e8 < max(free.predicted.memory_bytes.values())
    assert tight.predicted.step_time_s["total"] >= free.predicted.step_time_s["total"]


def test_a_device_with_less_memory_gets_fewer_blocks(topology, run):
    asked = run(rows=4, dims={"layers": 8, "dim": 1024, "heads": 16}, parallel=PIPELINE)
    made = topology((1, 1), memory=4e9)
    small = made.nodes[0].devices[0].model_copy(update={"memory_bytes": 2e9})
    nodes = [made.nodes[0].model_copy(update={"devices": [small]}), made.nodes[1]]
    cut = make_plan(asked, asked.spec(), made.model_copy(update={"nodes": nodes}))
    blocks = {row[0]: stage.layers[1] - stage.layers[0]
              for stage, row in zip(cut.stages, cut.replicas[0].devices, strict=True)}  # fmt: skip
    assert blocks["local0:cpu0"] < blocks["local1:cpu0"]
    assert cut.predicted.memory_bytes["local0:cpu0"] <= 0.9 * 2e9


@pytest.mark.parametrize(
    ("error", "message", "fields", "made"),
    [
        (RefusedError, r"the model \(.*parameters\) cannot fit: .* would need .* and has 7.5 GiB, of which 90 % "
                  r"\(6.7 GiB\) may be used; use more", {"dims": {"layers": 48, "dim": 8192, "heads": 64}}, {}),
        (RefusedError, "parallel: found pp 3 × dp 1 × tp 1; 3 devices are needed, 2 are usable; lower",
         {"parallel": {"mode": "fixed", "pp": 3}}, {}),
        (InputError, "heads 4 is not a multiple of tp 3", {"parallel": {"mode": "fixed", "tp": 3}},
         {"speeds": (1, 1, 1)}),
        (InputError, "the model has 6 blocks, fewer than pp 7", {"parallel": {"mode": "fixed", "pp": 7}},
         {"speeds": (1,) * 7}),
        (InputError, "batch.global 1 is less than one sequence for each of dp 2",
         {"rows": 1, "parallel": REPLICAS}, {}),
        (InputError, r"parallel.micro_batch: found 3, batch.global 16 .*allowed: 1, 2, 4, 8, 16",
         {"parallel": {"mode": "fixed", "micro_batch": 3}}, {}),
        (InputError, "batch.global 16 makes 1 micro-batch of 16, too few for 2 replicas; change",
         {"parallel": {"mode": "fixed", "dp": 2, "micro_batch": 16}}, {}),
        (RefusedError, "the verdict excludes local0, local1 of 2 nodes", {}, {"exclude": ["local0", "local1"]}),
        (RefusedError, "recovery.spares: found 2, but only 2 nodes are usable", {"recovery": {"spares": 2}}, {}),
        (RefusedError, "cluster.device: found 'cuda', the topology has cpu only", {"cluster": {"device": "cuda"}}, {}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_in_one_line(plan, topology, error, message, fields, made):
    with pytest.raises(error, match=message) as caught:
        plan(topology(**made), **fields)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def test_figures_that_are_missing_are_named(plan, topology):
    made = topology()
    bare = made.nodes[1].model_copy(update={"devices": [made.nodes[1].devices[0].model_copy(update={"flops": {}})]})
    with pytest.raises(InputError, match="device cpu0 of local1: flops has no 'fp32'; run `hpctrain probe`"):
        plan(made.model_copy(update={"nodes": [made.nodes[0], bare]}))
    unlinked = made.model_copy(update={"fabric": made.fabric.model_copy(update={"classes": []})})
    with pytest.raises(InputError, match="no alpha_s and beta_s_per_byte between local0 and local1"):
        plan(unlinked)


@pytest.mark.slow
def test_most_of_eight_different_devices_are_used(plan, topology):
    made = plan(topology([1 - 0.1 * number for number in range(8)]), rows=64)
    assert made.world_size > 4


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.lists(st.sampled_from([1.0, 0.7, 0.3]), min_size=2, max_size=3),
    st.integers(1, 2),
    st.sampled_from([(1e-5, 1e-10), (5e-5, 1e-9), (5e-3, 1e-7)]),
    st.sampled_from([1, 6, 8]),
    st.integers(3, 4),
)
@pytest.mark.slow
def test_nothing_beats_the_bounds(topology, run, speeds, devices, link, rows, layers):
    asked = run(rows=rows, dims={"layers": layers})
    made = make_plan(asked, asked.spec(), topology(speeds, devices=devices, default=link))
    total = made.predicted.step_time_s["total"]
    assert made.predicted.bound_s <= total
    assert all(entry.delta_s is None or entry.delta_s >= 0 for entry in made.rejected)
    assert made.sequences == rows
