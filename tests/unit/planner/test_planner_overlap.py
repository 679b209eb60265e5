"""Sums that pass beside the backward pass."""

import pytest

from hpctrain.planner.cost.collectives import overlapped_share
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.layout.layout import Option
from hpctrain.planner.layout.partition import why_no_layout
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.simulate.predict import overlapped_s, predict, simulate_step
from hpctrain.records.plan.plan import ParallelDims

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
    hidden = overlapped_s(cost, layout, summed.wire_s)
    spec = cost.work.spec
    early = summed.wire_s * (1 - spec.embedding_parameters() / spec.parameters())
    assert hidden == pytest.approx(min(early, backward))
    assert predict(cost, layout).terms["data_parallel"] == pytest.approx(summed.seconds - hidden)
    assert simulate_step(cost, layout).sums == pytest.approx([summed.seconds - hidden])


@pytest.mark.parametrize(
    ("degrees", "asked"),
    [
        ({"dp": 2, "pp": 2}, {}),
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
