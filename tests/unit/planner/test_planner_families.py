"""Models of every family are planned; an encoder-decoder's blocks are unequal, and its seam is where it is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.base.errors import InputError
from hpctrain.planner import make_plan
from hpctrain.planner.cost.workload import ModelPart, workload_of
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.limits import DEFAULT_LIMITS
from hpctrain.planner.make import PlanRequest
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import PRESETS, FamilySpec
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology
from hpctrain.schedule.runnable import check_runnable

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_annealing")]


def topology(count: int) -> Topology:
    device = Device(
        id="cuda0", type="gpu", flops={"fp32": 4e13, "bf16": 1.5e14}, memory_bytes=2.4e10, memory_bytes_per_s=9e11,
        launch_s=5e-6,
    )  # fmt: skip
    return Topology(
        provenance=Provenance(version="0", created="2099-01-01T00:00:00Z", transport="tcp", loopback=False),
        device_types={"gpu": DeviceType(kind="cuda", name="gpu")},
        nodes=[Node(id=f"n{i}", addr=f"10.0.0.{i + 1}", devices=[device]) for i in range(count)],
        fabric=Fabric(classes=[LinkClass(id="switch", alpha_s=2e-5, beta_s_per_byte=1e-10, pairs=6)]),
    )


def run(spec: FamilySpec, **parallel: object) -> Run:
    return Run.model_validate(
        {
            "steps": 1,
            "model": {"dims": spec.model_copy(update={"vocab": 32000})},
            "data": {"train": ["d"], "seq_len": 512},
            "batch": {"global": 32},
            "precision": "bf16",
            "parallel": {"mode": "fixed", **parallel} if parallel else {"mode": "auto"},
        }
    )


@pytest.mark.parametrize("preset", ["gpt2-355m", "paper-12x768", "encoder-1.3b", "t5-770m", "t5-v1.1-780m"])
def test_a_preset_of_every_family_is_planned(preset: str) -> None:
    asked = run(PRESETS[preset])
    plan = make_plan(asked, asked.spec(), topology(4))
    assert plan.layers == asked.spec().layers
    assert plan.predicted is not None
    assert plan.predicted.bound_s is not None
    assert 0 < plan.predicted.bound_s <= plan.predicted.step_time_s["total"]
    assert max(plan.predicted.memory_bytes.values()) <= 2.4e10


def test_a_cut_near_the_seam_goes_there_where_it_costs_next_to_nothing() -> None:
    limits = replace(DEFAULT_LIMITS, max_seam_slowdown=0.0)
    outcomes = set()
    for decoder_seq in range(160, 241, 16):
        spec = EncoderDecoderSpec(layers=12, encoder_layers=7, dim=512, heads=8, vocab=32000, decoder_seq=decoder_seq)
        asked = run(spec, pp=2, tp=1, schedule="1f1b")
        fastest = make_plan(asked, asked.spec(), topology(2), PlanRequest(limits=limits))
        scene = layout_of_plan(asked, asked.spec(), fastest, topology(2))
        at_seam = predict(scene.cost, replace(scene.layout, blocks=(7, 5))).total
        slowdown = at_seam / predict(scene.cost, scene.layout).total - 1
        cut = make_plan(asked, asked.spec(), topology(2)).stages[0].layers[1]
        assert cut == (7 if slowdown <= DEFAULT_LIMITS.max_seam_slowdown else fastest.stages[0].layers[1])
        outcomes.add((fastest.stages[0].layers[1] == 7, cut == 7))
    assert {(False, True), (False, False)} <= outcomes, "some cuts move to the seam and others do not"


def test_a_stage_amounts_to_the_blocks_that_it_holds() -> None:
    spec = EncoderDecoderSpec(layers=8, dim=64, heads=4, vocab=100, decoder_seq=16)
    work, _ = workload_of(run(spec), spec)
    encoder, decoder = (work.mean_blocks(ModelPart(4, first, not first)) for first in (True, False))
    # 512 tokens in the encoder, 16 in the decoder, whose cross-attention looks at all 512.
    assert encoder[0] > 3 * decoder[0]
    assert encoder[1] > 3 * decoder[1]
    assert work.mean_blocks(ModelPart(8, True, True)) == pytest.approx((8, 8))
    between = work.mean_blocks(ModelPart(2, False, False))
    assert between[0] == 2
    assert between[1] == pytest.approx(encoder[1] / 2)
    for share in (ModelPart(4, True, False), ModelPart(4, False, True), ModelPart(8, True, True)):
        start = 0 if share.first else 4
        assert work.parameters(share, 2) == spec.parameters(start, start + share.blocks, 2)


def test_the_backward_of_an_encoder_decoder_is_never_halved() -> None:
    """Its stages use their table of positions in every block; torch fails in the backward for such weights alone."""
    spec = PRESETS["t5-60m"].model_copy(update={"vocab": 8192})
    free, halved = run(spec, pp=4, tp=1), run(spec, pp=4, tp=1, schedule="interleaved_zero_bubble")
    assert make_plan(free, spec, topology(4)).schedule in ("gpipe", "1f1b", "interleaved_1f1b")
    with pytest.raises(InputError, match=r"parallel\.schedule: found interleaved_zero_bubble; an encoder_decoder uses"):
        make_plan(halved, spec, topology(4))
    other = PRESETS["bert-41m"].model_copy(update={"vocab": 8192})
    halves = make_plan(run(other, pp=4, tp=1, schedule="interleaved_zero_bubble"), other, topology(4))
    with pytest.raises(InputError, match=r"actions: found \dI0; an encoder_decoder .*; use schedule 1f1b"):
        check_runnable(halves, free)
