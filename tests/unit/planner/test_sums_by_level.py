"""Sums of gradients by level: when the planner chooses them, what it predicts for them, and what a run file says."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import InputError
from hpctrain.cli.views.plan_explanation import sums_label
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("short_annealing")

SLOW, FAST = (2e-4, 8e-8), (2e-5, 2e-10)
"""100 Mbit/s, and memory."""
DIMS = {"layers": 8, "dim": 512, "heads": 8}


@pytest.fixture
def nodes_of_two(topology):
    """Four nodes of two devices on slow links; within a node messages take the time of `intra`."""

    def made(default=SLOW, intra=FAST, devices=2):
        whole = topology((1.0,) * 4, default=default, devices=devices)
        figures = {"intra_alpha_s": intra[0], "intra_bytes_per_s": 1 / intra[1]}
        return whole.model_copy(update={"nodes": [node.model_copy(update=figures) for node in whole.nodes]})

    return made


def asked(compression, **further):
    parallel = {"mode": "fixed", "dp": 8, **further}
    return {"compression": compression, "parallel": parallel, "dims": DIMS, "steps": 1000, "rows": 8}


def levels(plan: Plan) -> list[tuple[str, str]]:
    return [(spec.level, spec.codec.mode) for spec in plan.compression]


def test_mode_auto_sums_within_nodes_first_where_links_between_them_are_slow(plan, nodes_of_two) -> None:
    made = plan(nodes_of_two(), **asked({"mode": "auto"}))
    flat = plan(nodes_of_two(), **asked({"mode": "auto", "intra_node": "flat"}))
    assert levels(made)[0][0] == "intra_node"
    assert levels(made)[1] == ("inter_node", "int4")
    assert levels(flat) == [("dp", "int4")]
    # Each node sends 1.5 times the gradients' bytes, to owners and back. Flat sums send 2.4 times: the parts of both
    # devices to owners on other nodes, and a ring of all sums.
    assert made.predicted.step_time_s["data_parallel"] < 0.65 * flat.predicted.step_time_s["data_parallel"]
    assert {entry.intra_node for entry in made.compression[1].compared} <= {"flat", "none", "bf16"}
    assert {entry.intra_node for entry in flat.compression[0].compared} == {"flat"}
    assert made.predicted.bound_s <= made.predicted.step_time_s["total"]


def test_messages_that_take_as_long_within_a_node_are_not_worth_it(plan, nodes_of_two) -> None:
    assert levels(plan(nodes_of_two(FAST, SLOW), **asked({"mode": "auto"})))[0][0] == "dp"


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_run_file_fixes_both_levels_and_the_plan_is_predicted_again_alike(zero: int, plan, run, nodes_of_two) -> None:
    topology, settings = nodes_of_two(), asked({"mode": "int8", "intra_node": "bf16"}, zero=zero)
    made = plan(topology, **settings)
    assert levels(made) == [("intra_node", "bf16"), ("inter_node", "int8")]
    assert made.level_replicas == 2
    again = Plan.model_validate_json(made.model_dump_json(by_alias=True))
    wanted = run(**settings)
    scene = layout_of_plan(wanted, wanted.spec(), again, topology)
    assert predict(scene.cost, scene.layout, whole=True).total == pytest.approx(made.predicted.step_time_s["total"])
    flat = plan(topology, **asked({"mode": "int8"}, zero=zero))
    assert made.predicted.step_time_s["data_parallel"] < flat.predicted.step_time_s["data_parallel"]


def test_nodes_of_one_replica_have_no_level_within(plan, nodes_of_two) -> None:
    made = plan(nodes_of_two(devices=1), **asked({"mode": "int8", "intra_node": "bf16"}, dp=4))
    assert levels(made) == [("dp", "int8")]


@pytest.mark.parametrize(
    ("compression", "zero", "words"),
    [({"mode": "local_steps", "intra_node": "none"}, 0, "it sums no gradients"),
     ({"mode": "topk", "intra_node": "none"}, 1, "selects numbers of whole parameters")],
)  # fmt: skip
def test_codecs_that_cannot_sum_by_level_are_refused(compression, zero: int, words: str, plan, nodes_of_two) -> None:
    with pytest.raises(InputError, match=words):
        plan(nodes_of_two(), **asked(compression, zero=zero))
    assert levels(plan(nodes_of_two(), **asked({**compression, "intra_node": "auto"}, zero=zero)))[0][0] == "dp"


def test_a_table_names_both_levels() -> None:
    assert [sums_label("int4", way) for way in (None, "flat", "bf16")] == ["int4", "int4", "int4, in nodes bf16"]


@pytest.fixture
def split_plan(plan, topology):
    """The plan of a model that two nodes split by tensor parallelism, over links with that alpha and beta."""

    def made(compression, link=SLOW, devices=1, **further):
        nodes = topology((1.0,) * (2 // devices), default=link, devices=devices)
        settings = asked(compression, dp=1, tp=2, **further.pop("parallel", {}))
        return plan(nodes, **settings, **further)

    return made


@pytest.mark.parametrize("parallel", [{}, {"sequence_parallel": True}, {"recompute": "full"}])
def test_tensor_parallelism_between_nodes_sends_half_the_bytes_in_bf16(parallel, split_plan, run) -> None:
    exact = split_plan({"mode": "none"}, parallel=parallel)
    made = split_plan({"mode": "none", "tensor_parallel": "bf16"}, parallel=parallel)
    assert (exact.tensor_parallel_sums, made.tensor_parallel_sums) == ("none", "bf16")
    seconds, rounded_s = (plan.predicted.step_time_s["tensor_parallel"] for plan in (exact, made))
    assert 0.5 * seconds < rounded_s < 0.6 * seconds
    assert made.predicted.bound_s <= made.predicted.step_time_s["total"]


def test_a_plan_with_sums_of_tensor_parallelism_in_bf16_is_predicted_again_alike(split_plan, run, topology) -> None:
    compression = {"mode": "none", "tensor_parallel": "bf16"}
    made = split_plan(compression)
    wanted = run(**asked(compression, dp=1, tp=2))
    scene = layout_of_plan(wanted, wanted.spec(), made, topology((1.0, 1.0), default=SLOW))
    assert predict(scene.cost, scene.layout, whole=True).total == pytest.approx(made.predicted.step_time_s["total"])


@pytest.mark.parametrize(
    ("compression", "fields", "sums", "words"),
    [
        ({"mode": "auto"}, {"precision": "bf16"}, "bf16", "sums in bf16 between nodes: a step of"),
        ({"mode": "auto", "lossy": True}, {}, "bf16", "sums in bf16 between nodes"),
        ({"mode": "none", "tensor_parallel": "auto"}, {"precision": "bf16"}, "bf16", "sums in bf16 between nodes"),
        ({"mode": "auto"}, {}, "none", "rounds activations, which auto does only with precision bf16 or lossy: true"),
        ({"mode": "auto", "loss_budget": 0.02}, {}, "none", "rounds activations"),
        ({"mode": "auto", "lossy": True}, {"link": FAST}, "none", "too little is won"),
        ({"mode": "auto", "lossy": True}, {"devices": 2}, "none", None),
        ({"mode": "auto", "tensor_parallel": "none", "lossy": True}, {}, "none", None),
        ({"mode": "none"}, {"precision": "bf16"}, "none", None),
    ],
)  # fmt: skip
def test_auto_rounds_activations_only_where_they_are_rounded_anyway(
    compression, fields, sums: str, words: str | None, split_plan
) -> None:
    made = split_plan(compression, **fields)
    assert made.tensor_parallel_sums == sums
    notes = [note for note in made.notes if note.startswith("Tensor parallelism sums")]
    assert len(notes) == (words is not None)
    assert all(words in note for note in notes)
