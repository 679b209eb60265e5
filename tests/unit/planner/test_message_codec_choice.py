"""Messages between stages: what they cost in fewer bytes, where mode auto takes them, and that the plan says why."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import CodecSeconds

pytestmark = pytest.mark.usefixtures("short_annealing")

SLOW, FAST = (2e-4, 8e-7), (5e-5, 2e-11)
"""10 Mbit/s, and memory."""
TWO = {"mode": "fixed", "pp": 2, "schedule": "1f1b", "micro_batch": 4}
QUICK = CodecSeconds(bf16=1e-13, quantized=1e-13, topk=1e-9, power_sgd=1e-9)


def ways(plan: Plan) -> list[str]:
    return [stage.messages for stage in plan.stages]


def total(plan: Plan) -> float:
    return plan.predicted.step_time_s["total"]


@pytest.mark.parametrize(("activations", "lossy", "expected"), [
    (None, False, "bf16"), (None, True, "int8"), ("auto", True, "int8"), ("none", True, "none"), ("bf16", True, "bf16"),
    ("int8", False, "int8"),
])  # fmt: skip
@pytest.mark.slow
def test_on_slow_links_auto_takes_what_it_may(plan, topology, activations, lossy, expected):
    asked = {"mode": "auto", "lossy": lossy} | ({} if activations is None else {"activations": activations})
    made = plan(topology(default=SLOW), compression=asked, parallel=TWO)
    assert ways(made) == [expected, "none"]
    assert made.predicted.bound_s <= total(made)
    assert made.codec.activations is None
    assert Plan.model_validate_json(made.model_dump_json(by_alias=True)) == made
    chose = [note for note in made.notes if note.startswith("Messages between stages")]
    assert len(chose) == (activations in (None, "auto"))
    assert all(f"travel in {expected}: a step of" in note for note in chose)


def test_with_another_mode_auto_takes_bf16_at_most_and_what_is_left_out_is_none(plan, topology):
    slow = topology(default=SLOW)
    assert ways(plan(slow, compression={"mode": "topk", "activations": "auto"}, parallel=TWO)) == ["bf16", "none"]
    assert ways(plan(slow, compression={"mode": "topk"}, parallel=TWO)) == ["none", "none"]
    assert ways(plan(slow, parallel=TWO)) == ["none", "none"]


def test_on_fast_links_messages_stay_as_they_are_and_the_plan_says_so(plan, topology):
    made = plan(topology(default=FAST), compression={"mode": "auto", "lossy": True}, parallel=TWO)
    assert ways(made) == ["none", "none"]
    assert "Messages between stages travel in fp32: in bf16 or int8 too little is won." in made.notes


def test_only_what_leaves_a_node_is_rounded(plan, topology):
    pair = topology((1.0, 1.0), devices=2, default=SLOW)
    four = {**TWO, "pp": 4}
    for asked in ({"mode": "auto"}, {"mode": "none", "activations": "bf16"}):
        made = plan(pair, compression=asked, parallel=four)
        nodes = [replica[0].node for replica in made.replicas[0].devices]
        leaves = [a != b for a, b in pairwise(nodes)]
        assert sum(leaves) == 1
        assert ways(made) == [*("bf16" if leaving else "none" for leaving in leaves), "none"]
        assert [made.messages(0, stage) for stage in range(4)] == ways(made)
    one = plan(topology((1.0,), devices=2), compression={"mode": "auto"}, parallel=TWO)
    assert ways(one) == ["none", "none"]
    assert not any("Messages" in note for note in one.notes)


def test_links_of_two_speeds_are_given_two_ways(plan, topology):
    """Integers pay on the slow link only: on the other one they take longer than they save."""
    codec = CodecSeconds(bf16=1e-13, quantized=1e-7, topk=1e-9, power_sgd=1e-9)
    links = {(0, 1): (1e-4, 4e-7), (1, 2): (1e-4, 5e-8), (0, 2): (1e-4, 4e-7)}
    made = plan(
        topology((1.0,) * 3, links=links, codec_s=codec, flops=1e12),
        compression={"mode": "auto", "lossy": True},
        parallel={**TWO, "pp": 3},
    )
    of = {
        frozenset(place.node for row in made.replicas[0].devices[stage : stage + 2] for place in row): way
        for stage, way in enumerate(ways(made)[:-1])
    }
    assert of[frozenset({"local1", "local2"})] == "bf16"
    assert [way for pair, way in of.items() if "local0" in pair] == ["int8"]


def test_bytes_and_processor_seconds_are_counted(plan, topology, run):
    """One micro-batch: forward, there, backward, and back, one after the other."""
    one = {**TWO, "micro_batch": 16}
    numbers = 16 * 64 * 128
    slow = topology(default=SLOW, codec_s=QUICK)
    exact, half, quarter = (
        total(plan(slow, compression={"mode": "none", "activations": way}, parallel=one))
        for way in ("none", "bf16", "int8")
    )
    assert exact - half == pytest.approx(2 * numbers * 2 * SLOW[1], rel=1e-3)
    assert exact - quarter == pytest.approx(2 * numbers * (3 - 4 / 256) * SLOW[1], rel=1e-3)
    late = topology(default=SLOW, codec_s=QUICK.model_copy(update={"bf16": 1e-8}))
    busy = total(plan(late, compression={"mode": "none", "activations": "bf16"}, parallel=one))
    assert busy - half == pytest.approx(numbers * 1e-8, rel=1e-3)


def test_a_plan_that_is_read_back_is_predicted_with_its_messages(plan, topology, run):
    asked = {"compression": {"mode": "auto"}, "parallel": TWO}
    there, wanted = topology(default=SLOW), run(**asked)
    made = plan(there, **asked)
    scene = layout_of_plan(wanted, wanted.spec(), made, there)
    assert predict(scene.cost, scene.layout, whole=True).total == pytest.approx(total(made))
    by_hand = made.model_copy(
        update={"stages": [made.stages[0].model_copy(update={"messages": "none"}), made.stages[1]]}
    )
    scene = layout_of_plan(wanted, wanted.spec(), by_hand, there)
    assert predict(scene.cost, scene.layout, whole=True).total > 1.2 * total(made)
