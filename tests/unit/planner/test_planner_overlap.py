"""Sums that pass beside the backward pass."""

import pytest

from hpctrain.planner.cost.collectives import overlapped_share
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.devices.constants import CPU_CONSTANTS
from hpctrain.planner.layout.layout import Option
from hpctrain.planner.layout.partition import why_no_layout
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.simulate.gradient_sums import overlapped_s, shard_collective_seconds, stage_sums
from hpctrain.planner.simulate.predict import TimedLayout, predict, simulate_step
from hpctrain.records.plan.plan import ParallelDims
from hpctrain.schedule.generate import SCHEDULE_NAMES, make_schedule, why_no_schedule
from hpctrain.schedule.resolve import completion_order

pytestmark = pytest.mark.usefixtures("short_annealing")

DIMS = {"layers": 4, "dim": 256, "heads": 4, "vocab": 512}


def fixed(**degrees):
    return {"mode": "fixed", "micro_batch": 2, **degrees}


def scene(plan, run, topology, **asked):
    made = plan(topology, dims=DIMS, **asked)
    wanted = run(dims=DIMS, **asked)
    return layout_of_plan(wanted, wanted.spec(), made, topology)


@pytest.mark.parametrize("default", [(1e-6, 1e-10), (1e-3, 1e-7)])
def test_messages_of_whole_replicas_pass_during_the_last_backward(plan, run, topology, default):
    found = scene(plan, run, topology((1, 1), default=default), parallel=fixed(dp=2))
    cost, layout = found.cost, found.layout
    (summed,) = cost.all_reduce_times(layout.placement, layout.model_parts, layout.rank_of_stage)
    backward = cost.stage(layout.unit(0, 0), layout.micro_batch, layout.model_parts[0]).backward
    # A fast link is at most as fast as the CPUs that send and receive, so nothing passes beside the computation.
    sending_s = CPU_CONSTANTS.sent_byte_passes * summed.sent_bytes / layout.unit(0, 0).bytes_per_s
    beside_s = max(0.0, summed.wire_s - sending_s)
    assert (beside_s > 0) == (default[1] > 1e-9)
    hidden = overlapped_s(cost, layout, beside_s)
    spec = cost.work.spec
    early = beside_s * (1 - spec.embedding_parameters() / spec.parameters())
    assert hidden == pytest.approx(min(early, backward))
    late = max(summed.wire_s, sending_s) + summed.processor_s - hidden
    assert predict(cost, layout).terms["data_parallel"] == pytest.approx(late)
    assert simulate_step(cost, layout).sums == pytest.approx([late])


@pytest.mark.parametrize(
    ("degrees", "asked"),
    [
        ({"dp": 2, "tp": 2}, {}),
        ({"dp": 4, "zero": 1}, {}),
        ({"dp": 4}, {"compression": {"mode": "topk"}}),
    ],
)
def test_others_wait_for_its_end(plan, run, topology, degrees, asked):
    four = topology((1, 1, 1, 1))
    found = scene(plan, run, four, parallel=fixed(**degrees), **asked)
    assert overlapped_s(found.cost, found.layout, 1.0) == 0.0
    stages, tp = len(found.layout.blocks), found.layout.tp
    assert overlapped_share(found.cost.work, stages, tp) == 0.0


SLOW_LINK = (1e-4, 1e-7)


@pytest.mark.parametrize("mode", ["none", "bf16"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
def test_a_stage_is_summed_while_the_pipeline_goes_on(plan, run, topology, schedule, mode):
    asked = {"parallel": fixed(dp=2, pp=2, schedule=schedule), "compression": {"mode": mode}}
    found = scene(plan, run, topology((1, 1, 1, 1), default=SLOW_LINK), **asked)
    cost, layout = found.cost, found.layout
    sums = cost.all_reduce_times(layout.placement, layout.model_parts, layout.rank_of_stage)
    step = simulate_step(cost, layout)
    for rank, held in enumerate(layout.stages_by_rank):
        ends = [max(line.stage_ends()[stage] for line in step.lines) for stage in held]
        wires, processors = (sum(getattr(sums[stage], part) for stage in held) for part in ("wire_s", "processor_s"))
        done = step.all_reduced_at(rank)
        # No earlier than the messages alone take.
        assert done >= max(step.sum_starts[rank] + wires, max(ends)) + processors - 1e-9
        # A rank's only stage fits into one bucket, which can be sent only at the end.
        assert (step.sum_starts[rank] < max(ends) - 1e-9) == (len(held) > 1)
    total = predict(cost, layout, whole=True).total
    assert max(map(step.all_reduced_at, range(layout.pp))) + step.update == pytest.approx(total)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_few_backwards_follow_the_first_stage_that_is_done(name):
    """At most 2·pp − 1 of each stage, and no forward: the bounds count on it."""
    looked_at = 0
    for pp in range(1, 6):
        for chunks in (1, 2, 3):
            for micro_batches in range(1, 4 * pp + 2):
                if why_no_schedule(name, pp, pp * chunks, micro_batches):
                    continue
                for row in make_schedule(name, pp, pp * chunks, micro_batches).ranks:
                    first = completion_order(row)[0]
                    last = max(i for i, action in enumerate(row) if action.stage == first and action.kind in "BW")
                    after = row[last + 1 :]
                    assert all(action.kind != "F" for action in after)
                    for stage in {action.stage for action in after}:
                        kinds = [action.kind for action in after if action.stage == stage]
                        assert max(kinds.count("B") + kinds.count("I"), kinds.count("B") + kinds.count("W")) < 2 * pp
                    looked_at += 1
    assert looked_at


@pytest.mark.parametrize(("zero", "mode", "refused"), [(2, "topk", True), (1, "topk", False), (2, "bf16", False)])
def test_a_choice_of_sharded_gradients_is_not_sent_for_each_micro_batch(plan, run, topology, zero, mode, refused):
    asked = {"parallel": fixed(dp=2, zero=zero), "compression": {"mode": mode}, "rows": 8}
    wanted = run(dims=DIMS, **asked)
    two = topology((1, 1))
    one = plan(two, dims=DIMS, **(asked | {"parallel": fixed(dp=2, zero=zero) | {"micro_batch": 4}}))
    cost = layout_of_plan(wanted, wanted.spec(), one, two).cost
    assert why_no_layout(cost, Option(ParallelDims(1, 2, 1), ScheduleSpec("1f1b"), 4)) is None, "one micro-batch"
    reason = why_no_layout(cost, Option(ParallelDims(1, 2, 1), ScheduleSpec("1f1b"), 2))
    assert ("each micro-batch" in (reason or "")) == refused


@pytest.mark.parametrize(
    ("zero", "asked", "beta", "hides"),
    [
        (2, {}, 1e-7, True),
        (3, {}, 1e-7, True),
        (2, {"compression": {"mode": "bf16"}}, 1e-7, True),
        (1, {}, 1e-7, False),  # gradients are summed when the backward has ended
        (2, {}, 1e-10, False),  # the processor is at work on messages all the time
        (2, {"compression": {"mode": "int8"}}, 1e-7, True),
        (2, {"compression": {"mode": "topk"}, "rows": 8}, 1e-7, True),
        (2, {"compression": {"mode": "tagc"}, "rows": 8}, 1e-7, True),
        (2, {"compression": {"mode": "tagc", "ratio": 4}, "rows": 8}, 1e-7, False),  # ranks tell what they decoded
        (2, {"parallel": fixed(dp=2, pp=2, zero=2, schedule="interleaved_zero_bubble")}, 1e-7, False),
    ],
)
def test_sums_of_a_sharded_state_on_cpus_pass_during_the_backward(plan, run, topology, zero, asked, beta, hides):
    nodes = topology((1,) * 4, default=(1e-4, beta))
    found = scene(plan, run, nodes, **({"parallel": fixed(dp=4, zero=zero)} | asked))
    cost, layout = found.cost, found.layout
    last = len(layout.blocks) - 1
    times = shard_collective_seconds(cost, layout)[last]
    stage = cost.stage(layout.unit(0, last), layout.micro_batch, layout.model_parts[last])
    passes = stage.forward, stage.backward, stage.inputs, stage.weights
    waits = times.per_micro_batch(zero, passes, prefetched=False)
    without = times._replace(beside_s=0.0).per_micro_batch(zero, passes, prefetched=False)
    split = layout.schedule == "interleaved_zero_bubble"
    spared = sum(without[2:]) - sum(waits[2:]) if split else without[1] - waits[1]
    assert spared == pytest.approx(min(stage.backward, times.beside_s * (1 - 1 / times.pieces)) if hides else 0.0)
    assert (spared > 0) == hides
    assert waits[0] == without[0], "weights are gathered before a pass"
    assert times.beside_s < times.scatter
    # A link carries all messages of a step; a rank computes all its passes.
    total, count = predict(cost, layout).total, layout.micro_batches[0]
    assert total >= count * stage.both
    assert TimedLayout(cost, layout).bound_s <= total * (1 + 1e-9)
    plain = plan(nodes, dims=DIMS, **({"parallel": fixed(dp=4, zero=zero)} | asked))
    assert plain.predicted.bound_s <= plain.predicted.step_time_s["total"] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("zero", "asked", "hides"),
    [
        (2, {}, True),
        (3, {}, True),
        (2, {"compression": {"mode": "int8"}}, True),
        (3, {"compression": {"mode": "topk"}}, False),
        (1, {}, False),  # a stage's shards are summed when its backward has ended
        (2, {"compression": {"mode": "int8"}, "precision": "fp16"}, False),
    ],
)
def test_copies_of_a_state_within_nodes_are_summed_module_by_module(plan, run, topology, zero, asked, hides):
    nodes = topology((1, 1), devices=2, default=SLOW_LINK)
    found = scene(plan, run, nodes, parallel=fixed(dp=4, zero=zero, shard="node"), **asked)
    cost, layout = found.cost, found.layout
    (times,) = shard_collective_seconds(cost, layout)
    (copies,) = cost.all_reduce_times(layout.placement, layout.model_parts, layout.rank_of_stage, layout.shards)
    assert times.copies == copies.seconds
    (summed,) = stage_sums(cost, layout, [times])
    assert (summed.hidden_s > 0) == hides
    assert summed.wire_s + summed.late_s == pytest.approx(times._replace(early_copies_s=0.0).per_step(zero))
    backward = cost.stage(layout.unit(0, 0), layout.micro_batch, layout.model_parts[0]).backward
    # Of five modules, the sums of the last two begin at the end.
    assert summed.hidden_s == pytest.approx(min(backward, 3 / 5 * cost.work.codec.overlap * summed.wire_s))
    assert TimedLayout(cost, layout).bound_s <= predict(cost, layout).total * (1 + 1e-9)
