"""Runs many cases in one launch of processes and prints a JSON result a case; called by the tests beside it.

python cases.py equivalence WORLD FOLDER   every plan of that many ranks against one process
python cases.py save 4 FOLDER; python cases.py load WORLD FOLDER   save on a few plans, load on all others
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_calls import early_sums, most_under_way, sums_and_actions
from processes import largest, launch, process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.load import CheckpointReader
from hpctrain.checkpoint.published import VerifiedCheckpoint, newest
from hpctrain.checkpoint.save import CheckpointSaver
from hpctrain.checkpoint.state import collect, fingerprint, prepare_moments, set_optimizer_step
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.corpus.read.objective import SpecialTokens, examples
from hpctrain.model.build import build_stage
from hpctrain.parallel.gradient_reducer import build_plan_reducer
from hpctrain.parallel.gradients import gradient_norm, local_gradients
from hpctrain.parallel.mesh import Coordinate, build_mesh
from hpctrain.parallel.pipeline import Pipeline, PipelineInputs, build_pipeline
from hpctrain.records.history.generation import GENERATIONS, Fence
from hpctrain.records.history.manifest import Manifest
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import EncoderSpec, FamilySpec, Gpt2Spec
from hpctrain.records.model.rope_scaling import LinearRope, Llama3Rope, LongRope, YarnRope
from hpctrain.records.plan.plan import Plan, Replica, Stage
from hpctrain.records.run.objective import NEXT_TOKEN, AnyObjective, Masked, lengths, resolved_objective
from hpctrain.schedule.resolve import schedule_of

SPEC = DecoderSpec(layers=4, dim=32, heads=4, kv_heads=2, vocab=64)
ODD = SPEC.model_copy(update={"vocab": 67})
"""A vocabulary that tensor parallelism cannot split evenly."""
TIED, TIED_ODD = (spec.model_copy(update={"tied": True}) for spec in (SPEC, ODD))
SEQ, ROWS, SEED, STEPS = 16, 8, 7, 2
EPS = 1e-3
"""Of AdamW. Its first steps divide each gradient by its own size: with less, the rounding of a gradient of 1e-9 shows
in the parameter, and how sums round depends on where their numbers lie in memory."""


def make_plan(
    pp: int,
    dp: int,
    tp: int,
    cuts: list[tuple[int, int]],
    shares: list[tuple[int, int]],
    schedule: str = "1f1b",
    order: list[int] | None = None,
    owner: list[int] | None = None,
    actions: dict[int, dict[int, list[str]]] | None = None,
    per_node: int = 1,
    **further: Any,
) -> Plan:
    """A plan by its degrees: `shares` are (micro_batch, micro_batches) of replicas, `order` the device of each rank,
    and `per_node` the devices of a node."""
    devices = [f"local{index // per_node}:cpu{index % per_node}" for index in range(pp * dp * tp)]
    owner = owner or [stage % pp for stage in range(len(cuts))]

    def row(stage: int, replica: int) -> list[str]:
        return [devices[(owner[stage] * dp + replica) * tp + part] for part in range(tp)]

    replicas = [
        Replica(
            sequences=size * count,
            micro_batch=size,
            micro_batches=count,
            devices=[row(stage, index) for stage in range(len(cuts))],
        )
        for index, (size, count) in enumerate(shares)
    ]
    return Plan(
        pp=pp, dp=dp, tp=tp, schedule=schedule, stages=[Stage(layers=cut) for cut in cuts], replicas=replicas,
        ranks=[devices[index] for index in order or range(len(devices))], actions=actions or {},
        **further,
    )  # fmt: skip


HALF, UNEVEN, EMBEDDING, QUARTERS = [(0, 2), (2, 4)], [(0, 3), (3, 4)], [(0, 0), (0, 4)], [(i, i + 1) for i in range(4)]
HEAD = [(0, 4), (4, 4)]
WHOLE = [(0, 4)]
V_OWNER = [0, 1, 1, 0]
V_SHAPE = {
    0: {
        0: ["0F0", "0F1", "3F0", "3I0", "3F1", "3W0", "3B1", "0B0", "0I1", "0W1"],
        1: ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2I1", "1I1", "2W1", "1W1"],
    }
}
"""Two neighbouring stages on one rank, and backwards cut in two."""
V_WHOLE = {
    0: {
        0: ["0F0", "0F1", "3F0", "3B0", "3F1", "3B1", "0B0", "0B1"],
        1: ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"],
    }
}
"""The same stages with whole backwards."""
CUSTOM = {0: {0: ["0F0", "0F1", "2F0", "2F1", "2B1", "2B0", "0B1", "0B0"], 1: ["1F0", "1F1", "1B1", "1B0"]}}

EVEN, SIZES, COUNTS, FOUR = [(2, 2), (2, 2)], [(3, 2), (1, 2)], [(2, 3), (1, 2)], [(1, 2)] * 4
V_SHAPES = dict.fromkeys((0, 1), V_SHAPE[0])


def sharded_plans(zero: int) -> dict[str, tuple[Plan, FamilySpec]]:
    """Plans of one ZeRO level."""
    return {
        f"zero{zero} dp2": (make_plan(1, 2, 1, WHOLE, EVEN, zero=zero), SPEC),
        f"zero{zero} dp2 sizes, odd vocabulary": (make_plan(1, 2, 1, WHOLE, SIZES, zero=zero), ODD),
        f"zero{zero} dp2, two stages": (make_plan(1, 2, 1, HALF, EVEN, "interleaved_1f1b", zero=zero), SPEC),
        f"zero{zero} pp2 dp2": (make_plan(2, 2, 1, UNEVEN, EVEN, order=[2, 0, 3, 1], zero=zero), SPEC),
        f"zero{zero} pp2 dp2 interleaved": (make_plan(2, 2, 1, QUARTERS, EVEN, "interleaved_1f1b", zero=zero), SPEC),
        f"zero{zero} pp2 dp2 V": (
            make_plan(2, 2, 1, QUARTERS, EVEN, "custom", owner=V_OWNER, actions=V_SHAPES, zero=zero), SPEC,
        ),
        f"zero{zero} dp2 tp2": (make_plan(1, 2, 2, WHOLE, SIZES, order=[1, 0, 2, 3], zero=zero), SPEC),
        f"zero{zero} dp4 in pairs": (make_plan(1, 4, 1, WHOLE, FOUR, zero=zero, shard=2), SPEC),
    }  # fmt: skip


SHARDED = {
    **sharded_plans(1),
    **sharded_plans(2),
    **sharded_plans(3),
    "zero1 pp2 dp2 tp2": (make_plan(2, 2, 2, UNEVEN, EVEN, zero=1), SPEC),
    "zero2 pp2 dp2 tp2": (make_plan(2, 2, 2, UNEVEN, EVEN, zero=2), SPEC),
    "zero1 dp2 counts": (make_plan(1, 2, 1, WHOLE, COUNTS, zero=1), SPEC),
    "zero1 pp2 dp2 counts": (make_plan(2, 2, 1, QUARTERS, [(1, 4), (2, 2)], "interleaved_1f1b", zero=1), SPEC),
}
IN_NODES = {
    f"{name}, two devices a node": (make_plan(*degrees, per_node=2, **further), SPEC)  # type: ignore[arg-type]
    for name, degrees, further in (
        ("dp2 tp2", (1, 2, 2, WHOLE, SIZES), {}),
        ("pp2 tp2 sequence", (2, 1, 2, UNEVEN, [(2, 4)]), {"sequence_parallel": True}),
        ("pp2 dp2 stages in a node", (2, 2, 1, UNEVEN, EVEN), {"order": [0, 2, 1, 3]}),
        ("zero3 pp2 dp2 stages in a node", (2, 2, 1, UNEVEN, EVEN), {"order": [0, 2, 1, 3], "zero": 3}),
        ("zero3 dp4 hybrid", (1, 4, 1, WHOLE, FOUR), {"zero": 3, "shard": 2}),
        ("zero2 dp4 tp2 hybrid", (1, 4, 2, WHOLE, FOUR), {"zero": 2, "shard": 2}),
    )
}
"""Tensor parallelism, replicas of one sharded state, or the stages of a replica lie within nodes of two devices."""


def by_level(intra: str = "none", per_node: int = 2, **codec: Any) -> dict[str, Any]:
    """The further values of a plan whose gradients are summed within nodes, then between them by a codec."""
    inner, outer = {"level": "intra_node", "codec": {"mode": intra}}, {"level": "inter_node", "codec": codec}
    return {"per_node": per_node, "compression": [inner, outer]}


BY_LEVEL = {
    "dp4 uneven, tied, by level": (
        make_plan(1, 4, 1, WHOLE, [(1, 1), (1, 3), (1, 1), (1, 3)], **by_level(mode="none")),
        SPEC.model_copy(update={"tied": True, "vocab": 67}),
    ),
    "zero1 dp4 uneven, by level": (
        make_plan(1, 4, 1, WHOLE, [(1, 1), (1, 3), (1, 1), (1, 3)], zero=1, **by_level("none", mode="none")),
        ODD,
    ),
    "zero2 dp4, two stages, by level": (
        make_plan(1, 4, 1, HALF, FOUR, "interleaved_1f1b", zero=2, **by_level(mode="none")),
        SPEC,
    ),
    "zero3 dp4, by level": (make_plan(1, 4, 1, WHOLE, FOUR, zero=3, **by_level(mode="none")), SPEC),
    "zero3 dp4 hybrid, by level": (make_plan(1, 4, 1, WHOLE, FOUR, zero=3, shard=2, **by_level(mode="none")), SPEC),
    "pp2 dp4, by level": (make_plan(2, 4, 1, UNEVEN, FOUR, **by_level(mode="none")), SPEC),
    "dp4 tp2, by level": (make_plan(1, 4, 2, WHOLE, FOUR, **by_level(per_node=4, mode="none")), SPEC),
}
DEEP = SPEC.model_copy(update={"layers": 8})
EIGHTHS, FIFTHS = [(i, i + 1) for i in range(8)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4)]
V_ENDS = [(0, 0), (0, 2), (2, 4), (4, 4)]
FIVE_STAGES = {
    0: {
        0: ["0F0", "0F1", "2F0", "2F1", "4F0", "4I0", "4F1", "4B1", "2I0", "2B1", "4W0", "0B0", "0B1", "2W0"],
        1: ["1F0", "1F1", "3F0", "3F1", "3B0", "3I1", "1B0", "3W1", "1B1"],
    }
}
"""Stages of one block, and one with the head alone; backwards cut in two for some of them only."""

PLANS: dict[str, tuple[Plan, FamilySpec]] = {
    "one": (make_plan(1, 1, 1, WHOLE, [(8, 1)]), SPEC),
    "one, micro-batches": (make_plan(1, 1, 1, WHOLE, [(2, 4)], "gpipe"), SPEC),
    "pp2 gpipe": (make_plan(2, 1, 1, HALF, [(2, 4)], "gpipe"), SPEC),
    "pp2 1f1b": (make_plan(2, 1, 1, HALF, [(2, 4)]), SPEC),
    "pp2 uneven": (make_plan(2, 1, 1, UNEVEN, [(1, 8)]), SPEC),
    "pp2 one micro-batch": (make_plan(2, 1, 1, UNEVEN, [(8, 1)]), SPEC),
    "pp2 ranks turned": (make_plan(2, 1, 1, UNEVEN, [(2, 4)], order=[1, 0]), SPEC),
    "pp2 embedding alone": (make_plan(2, 1, 1, EMBEDDING, [(2, 4)]), SPEC),
    "pp2 head alone": (make_plan(2, 1, 1, HEAD, [(2, 4)]), SPEC),
    "pp2 interleaved": (make_plan(2, 1, 1, QUARTERS, [(2, 4)], "interleaved_1f1b"), SPEC),
    "pp2 custom, three stages": (
        make_plan(2, 1, 1, [(0, 1), (1, 3), (3, 4)], [(4, 2)], "custom", owner=[0, 1, 0], actions=CUSTOM), SPEC,
    ),
    "pp2 V": (make_plan(2, 1, 1, QUARTERS, [(4, 2)], "custom", owner=V_OWNER, actions=V_SHAPE), SPEC),
    "pp2 zero bubble": (make_plan(2, 1, 1, UNEVEN, [(2, 4)], "interleaved_zero_bubble"), SPEC),
    "pp2 interleaved zero bubble": (make_plan(2, 1, 1, QUARTERS, [(2, 4)], "interleaved_zero_bubble"), SPEC),
    "pp2 zbv": (make_plan(2, 1, 1, QUARTERS, [(2, 4)], "zbv", owner=V_OWNER), SPEC),
    "pp2 zbv, ends without blocks": (make_plan(2, 1, 1, V_ENDS, [(4, 2)], "zbv", owner=V_OWNER), SPEC),
    "pp2 five stages, three on one device": (
        make_plan(2, 1, 1, FIFTHS, [(4, 2)], "custom", owner=[0, 1, 0, 1, 0], actions=FIVE_STAGES), SPEC,
    ),
    "pp1, two stages": (make_plan(1, 1, 1, HALF, [(2, 4)], "interleaved_1f1b"), SPEC),
    "tp2, two stages": (make_plan(1, 1, 2, HALF, [(2, 4)], "interleaved_1f1b"), SPEC),
    "dp2": (make_plan(1, 2, 1, WHOLE, [(2, 2), (2, 2)]), SPEC),
    "dp2 uneven": (make_plan(1, 2, 1, WHOLE, [(2, 3), (1, 2)]), SPEC),
    "tp2": (make_plan(1, 1, 2, WHOLE, [(4, 2)]), SPEC),
    "tp2 ranks turned": (make_plan(1, 1, 2, WHOLE, [(4, 2)], order=[1, 0]), SPEC),
    "tp2 odd vocabulary": (make_plan(1, 1, 2, WHOLE, [(4, 2)]), ODD),
    "pp2 dp2 uneven": (make_plan(2, 2, 1, UNEVEN, [(2, 3), (1, 2)], order=[3, 0, 2, 1]), SPEC),
    "pp2 tp2": (make_plan(2, 1, 2, UNEVEN, [(2, 4)], order=[3, 0, 2, 1]), SPEC),
    "dp2 tp2": (make_plan(1, 2, 2, WHOLE, [(2, 3), (1, 2)], order=[3, 0, 2, 1]), SPEC),
    "pp4": (make_plan(4, 1, 1, QUARTERS, [(2, 4)]), SPEC),
    "pp4 zbv": (make_plan(4, 1, 1, EIGHTHS, [(1, 8)], "zbv", owner=[0, 1, 2, 3, 3, 2, 1, 0]), DEEP),
    "pp2 zbv dp2 uneven": (make_plan(2, 2, 1, QUARTERS, [(2, 3), (1, 2)], "zbv", owner=V_OWNER), SPEC),
    "pp2 zbv tp2": (make_plan(2, 1, 2, QUARTERS, [(2, 4)], "zbv", owner=V_OWNER), SPEC),
    "pp3": (make_plan(3, 1, 1, [(0, 2), (2, 3), (3, 4)], [(2, 4)]), SPEC),
    "pp3 fewer micro-batches than ranks": (make_plan(3, 1, 1, [(0, 1), (1, 2), (2, 4)], [(4, 2)]), SPEC),
    "pp3 zero bubble": (make_plan(3, 1, 1, [(0, 2), (2, 3), (3, 4)], [(1, 8)], "interleaved_zero_bubble"), SPEC),
    "pp2 interleaved dp2 uneven rounds": (make_plan(2, 2, 1, QUARTERS, [(1, 5), (1, 3)], "interleaved_1f1b"), SPEC),
    "pp2 interleaved dp2": (make_plan(2, 2, 1, QUARTERS, [(1, 4), (2, 2)], "interleaved_1f1b"), SPEC),
    **SHARDED,
    **IN_NODES,
    **BY_LEVEL,
}  # fmt: skip


def changed(name: str, recompute: tuple[str, ...] = (), **changes: Any) -> Plan:
    """A plan of the table above with other values; `recompute` by stage, repeated."""
    value = PLANS[name][0].model_dump() | changes
    for index, stage in enumerate(value["stages"] if recompute else []):
        stage["recompute"] = recompute[index % len(recompute)]
    return Plan.model_validate(value)


HALVES = {0: {0: [f"{action}{index}" for index in range(2) for action in ("0F", "1F", "1I", "0I", "1W", "0W")]}}

PLANS |= {
    "one, tied": (changed("one"), TIED),
    "one, full": (changed("one, micro-batches", ("full",)), SPEC),
    "one, selective": (changed("one, micro-batches", ("selective",)), SPEC),
    "pp1, two stages, tied": (changed("pp1, two stages"), TIED),
    "pp2 tied": (changed("pp2 uneven"), TIED),
    "pp2 tied, ends alone": (make_plan(2, 1, 1, [(0, 0), (0, 4), (4, 4)], [(4, 2)], "custom", actions=CUSTOM), TIED),
    "pp2 V tied": (changed("pp2 V"), TIED),
    "pp2 full and selective": (changed("pp2 interleaved", ("full", "selective")), SPEC),
    "dp2 tied": (changed("dp2 uneven"), TIED),
    "dp2, two stages, tied": (make_plan(1, 2, 1, HALF, EVEN, "interleaved_1f1b"), TIED),
    "dp2 tp2, two stages": (make_plan(1, 2, 2, HALF, EVEN, "interleaved_1f1b"), SPEC),
    "tp2 tied": (changed("tp2 ranks turned"), TIED),
    "tp2 tied, odd vocabulary": (changed("tp2"), TIED_ODD),
    "tp2 full": (changed("tp2", ("full",)), SPEC),
    "tp2 selective": (changed("tp2", ("selective",)), SPEC),
    "tp2 sequence": (changed("tp2", sequence_parallel=True), SPEC),
    "tp2 sequence, odd vocabulary": (changed("tp2", sequence_parallel=True), ODD),
    "tp2 sequence, tied, odd vocabulary": (changed("tp2", sequence_parallel=True), TIED_ODD),
    "tp2 sequence, two stages, tied": (changed("tp2, two stages", sequence_parallel=True), TIED),
    "tp2 sequence, full and selective": (
        changed("tp2, two stages", ("full", "selective"), sequence_parallel=True), SPEC,
    ),
    "tp2 sequence, halved backwards": (
        make_plan(1, 1, 2, HALF, [(4, 2)], "custom", actions=HALVES, sequence_parallel=True), SPEC,
    ),
    "pp2 dp3 tied, head alone": (make_plan(2, 3, 1, HEAD, [(2, 2), (1, 2), (2, 1)]), TIED),
    "pp2 dp2 tied": (changed("pp2 dp2 uneven", ("selective", "none")), TIED),
    "pp2 tp2 sequence": (changed("pp2 tp2", sequence_parallel=True), SPEC),
    "pp2 tp2 sequence, tied": (changed("pp2 tp2", ("full",), sequence_parallel=True), TIED),
    "dp2 tp2 sequence, tied": (changed("dp2 tp2", sequence_parallel=True), TIED),
}  # fmt: skip


GPT2 = Gpt2Spec(layers=4, dim=32, heads=4, vocab=64, positions=20)
ENCODER = EncoderSpec(layers=4, dim=32, heads=4, vocab=64, positions=20)
ROBERTA = EncoderSpec(
    layers=4, dim=32, heads=4, vocab=64, positions=18, position_offset=6, padding_id=5, segments=1, norm_eps=1e-5
)
PADDED = SPEC.model_copy(update={"padding_id": 0})
"""Token 0 is among the inputs, and its embedding gets no gradient from them."""
OPT = GPT2.model_copy(update={"activation": "relu", "position_offset": 2, "padding_id": 1})
NEOX = GPT2.model_copy(update={"activation": "gelu", "parallel_residual": True, "rotary_dim": 4, "tied": False})
T5 = EncoderDecoderSpec(layers=4, dim=32, heads=4, vocab=64, buckets=8, max_distance=10)
GATED = T5.model_copy(update={"gated": True, "tied": False, "encoder_layers": 1, "vocab": 67})
PLANS |= {
    "pp2 V, gpt2": (PLANS["pp2 V"][0], GPT2),
    "pp2 V, opt": (PLANS["pp2 V"][0], OPT),
    "tp2, opt": (PLANS["tp2"][0], OPT),
    "pp2 zero bubble, gpt-neox": (PLANS["pp2 zero bubble"][0], NEOX),
    "tp2 sequence, gpt-neox": (PLANS["tp2 sequence"][0], NEOX),
    "pp2 V, encoder": (PLANS["pp2 V"][0], ENCODER),
    "pp2 V, encoder-decoder": (make_plan(2, 1, 1, QUARTERS, [(4, 2)], "custom", owner=V_OWNER, actions=V_WHOLE), T5),
    "pp2 1f1b, encoder-decoder": (PLANS["pp2 1f1b"][0], T5),
    "pp2 full and selective, encoder-decoder": (PLANS["pp2 full and selective"][0], GATED),
    "tp2, encoder-decoder": (PLANS["tp2"][0], GATED),
    "tp2 sequence, encoder": (PLANS["tp2 sequence"][0], ENCODER),
    "tp2 sequence, roberta": (PLANS["tp2 sequence"][0], ROBERTA),
    "pp2 tied ends, roberta": (PLANS["pp2 uneven"][0], ROBERTA),
    "tp2, padding token": (PLANS["tp2"][0], PADDED),
    "zero3 dp2, padding token": (PLANS["zero3 dp2"][0], PADDED),
    "pp4, encoder-decoder": (PLANS["pp4"][0], T5),
    "pp2 dp2 uneven, encoder-decoder": (PLANS["pp2 dp2 uneven"][0], T5),
    "zero3 pp2 dp2, encoder-decoder": (PLANS["zero3 pp2 dp2"][0], T5),
}


LIKE_GEMMA = SPEC.model_copy(
    update={
        "head_dim": 12, "norms": "both", "norm_offset": True, "qk_norm": "head", "activation": "gelu_tanh",
        "embedding_scaled": True, "score_width": 20, "score_cap": 5.0, "logit_cap": 3.0, "window": 5,
        "full_blocks": (1, 3), "window_rope_base": 100.0, "tied": True,
        "rope_scaling": LinearRope(mode="linear", factor=3),
    }
)  # fmt: skip
LIKE_OLMO = SPEC.model_copy(
    update={"norms": "after", "qk_norm": "width", "attention_bias": "all", "rotary_dim": 4, "init_std": 0.3}
)
"""The norms divide by the size of what the matrices give: with small initial weights, gradients are in the hundreds."""
LIKE_QWEN = SPEC.model_copy(
    update={
        "attention_bias": "qkv", "window": 7, "full_blocks": (0, 1),
        "rope_scaling": Llama3Rope(
            mode="llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_positions=16
        ),
    }
)  # fmt: skip
LIKE_PHI = SPEC.model_copy(
    update={
        "head_dim": 12, "rotary_dim": 8, "window": 9, "padding_id": 3,
        "rope_scaling": LongRope(
            mode="longrope", short_factor=(1, 2, 3, 4), long_factor=(2, 3, 4, 9), original_positions=8,
            attention_factor=1.2,
        ),
    }
)  # fmt: skip
"""Sequences are longer than `original_positions`, so the long factors count."""
LIKE_QWEN3 = SPEC.model_copy(
    update={"qk_norm": "head", "rope_scaling": YarnRope(mode="yarn", factor=4, original_positions=8)}
)
UNTIED_OPT, UNTIED_ROBERTA = (spec.model_copy(update={"tied": False, "vocab": 67}) for spec in (OPT, ROBERTA))
PLANS |= {
    "pp2 tp2 sequence, like Phi": (PLANS["pp2 tp2 sequence"][0], LIKE_PHI),
    "zero3 dp2, two stages, like Phi": (PLANS["zero3 dp2, two stages"][0], LIKE_PHI),
    "zero2 dp2, like Qwen3": (PLANS["zero2 dp2"][0], LIKE_QWEN3),
    "zero2 pp2 dp2, like Qwen": (PLANS["zero2 pp2 dp2"][0], LIKE_QWEN),
    "zero1 pp2 dp2 V, tied": (PLANS["zero1 pp2 dp2 V"][0], TIED),
    "zero3 pp2 dp2 V, tied": (PLANS["zero3 pp2 dp2 V"][0], TIED),
    "zero3 dp2 tp2, like Gemma": (PLANS["zero3 dp2 tp2"][0], LIKE_GEMMA),
    "zero3 dp2, gpt-neox": (PLANS["zero3 dp2"][0], NEOX),
    "zero2 dp2 tp2, untied opt": (PLANS["zero2 dp2 tp2"][0], UNTIED_OPT),
    "zero3 pp2 dp2, untied roberta": (PLANS["zero3 pp2 dp2"][0], UNTIED_ROBERTA),
    "pp2 tp2 sequence, like Gemma": (PLANS["pp2 tp2 sequence"][0], LIKE_GEMMA),
    "tp2 selective, like Gemma": (PLANS["tp2 selective"][0], LIKE_GEMMA),
    "pp2 tp2, like OLMo": (PLANS["pp2 tp2"][0], LIKE_OLMO),
    "tp2 sequence, like OLMo": (PLANS["tp2 sequence"][0], LIKE_OLMO),
    "zero1 dp2 tp2, like OLMo": (PLANS["zero1 dp2 tp2"][0], LIKE_OLMO),
    "pp2 tp2, like Qwen": (PLANS["pp2 tp2"][0], LIKE_QWEN),
    "pp2 full and selective, like Qwen": (PLANS["pp2 full and selective"][0], LIKE_QWEN),
}


PLANS |= {
    name: (Plan.model_validate(plan.model_dump() | {"tensor_parallel_sums": "bf16"}), spec)
    for name, (plan, spec) in {
        "tp2 tied, in bf16": PLANS["tp2 tied"],
        "tp2 selective, like Gemma, in bf16": PLANS["tp2 selective, like Gemma"],
        "tp2, encoder-decoder, in bf16": PLANS["tp2, encoder-decoder"],
        "tp2 sequence, roberta, in bf16": PLANS["tp2 sequence, roberta"],
        "tp2 sequence, full and selective, in bf16": PLANS["tp2 sequence, full and selective"],
        "pp2 tp2 sequence, in bf16": PLANS["pp2 tp2 sequence"],
        "zero3 dp2 tp2, in bf16": PLANS["zero3 dp2 tp2"],
        "tp4 by level, opt, in bf16": (make_plan(1, 1, 4, WHOLE, [(4, 2)], per_node=2), OPT),
        "tp4 sequence by level, gpt2, in bf16": (
            make_plan(1, 1, 4, WHOLE, [(4, 2)], per_node=2, sequence_parallel=True), GPT2,
        ),
    }.items()
}  # fmt: skip
"""Tensor-parallel groups that span nodes and sum in bf16 between them."""


def batch(spec: FamilySpec, step: int, length: int = SEQ) -> torch.Tensor:
    """The global batch of a step: [ROWS, length + 1]."""
    return torch.randint(0, spec.vocabulary, (ROWS, length + 1), generator=torch.Generator().manual_seed(step))


MASKED = Masked(mode="masked")


def samples(spec: FamilySpec, step: int, objective: AnyObjective) -> tuple[torch.Tensor, ...]:
    """Inputs and targets of the global batch of a step, each [ROWS, SEQ]; with two stacks the targets are shorter, and
    what the decoder reads comes behind them."""
    sizes, vocabulary = lengths(objective, SEQ), spec.vocabulary
    special = SpecialTokens(
        vocabulary - 1, vocabulary, end_of_text=0, mask=vocabulary - 1, start=1,
        sentinels=tuple(range(vocabulary - 1, vocabulary - 1 - sizes.spans, -1)),
    )  # fmt: skip
    tokens, numbers = batch(spec, step, sizes.raw).numpy(), np.arange(step * ROWS, (step + 1) * ROWS)
    made = examples(objective, special, SEQ, SEED, numbers, tokens)
    return tuple(torch.from_numpy(part) for part in made if part is not None)


REFERENCES: dict[tuple[str, AnyObjective], dict[str, object]] = {}


def reference(spec: FamilySpec, objective: AnyObjective) -> dict[str, object]:
    """What one process gives, computed once for each model and objective."""
    key = spec.sha256(), objective
    if key not in REFERENCES:
        REFERENCES[key] = train_alone(spec, objective)
    return REFERENCES[key]


def train_alone(spec: FamilySpec, objective: AnyObjective) -> dict[str, object]:
    """One process, whole batch, no hpctrain wiring: losses, first gradients, parameters after STEPS steps."""
    model = build_stage(spec, 0, spec.layers, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
    losses, gradients = [], {}
    for step in range(STEPS):
        inputs, targets, *decoder_tokens = samples(spec, step, objective)
        loss = F.cross_entropy(model(inputs, *decoder_tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    norm = float(torch.stack([g.double().pow(2).sum() for g in gradients.values()]).sum().sqrt())
    return {"losses": losses, "gradients": gradients, "norm": norm, "parameters": dict(model.named_parameters())}


MESHES: dict[str, DeviceMesh] = {}
GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def mesh_of(plan: Plan) -> DeviceMesh:
    """The plan's mesh, one for all plans with the same ranks: torch's caches of DTensor keep every mesh, and the thread
    of each of its gloo groups wakes up a hundred times a second. So meshes share their groups, too."""
    key = f"{plan.mesh()} {plan.shards} {plan.level_replicas}"
    if key not in MESHES:
        with patch("torch.distributed.device_mesh.new_group", shared_group):
            MESHES[key] = build_mesh(plan, "cpu")
    return MESHES[key]


def shared_group(ranks: list[int], **_: Any) -> dist.ProcessGroup:
    """The gloo group of these ranks, the same one for all axes of all meshes. Collective over all ranks."""
    if tuple(ranks) not in GROUPS:
        GROUPS[tuple(ranks)] = dist.new_group(ranks)
    return GROUPS[tuple(ranks)]


def open_pipeline(
    plan: Plan, spec: FamilySpec, rank: int, objective: AnyObjective = NEXT_TOKEN
) -> tuple[Pipeline, Coordinate, Reducer]:
    """This rank's part of a plan."""
    coordinate, mesh = Coordinate.of(plan, rank), mesh_of(plan)
    schedule, _ = schedule_of(plan, coordinate.dp)
    inputs = PipelineInputs(plan, spec, schedule, SEQ, SEED, torch.device("cpu"), objective=objective)
    pipeline = build_pipeline(inputs, mesh, coordinate)
    return pipeline, coordinate, build_plan_reducer(plan, mesh, pipeline)


def my_rows(plan: Plan, coordinate: Coordinate, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This replica's part of a global batch."""
    mine = tokens[my_part(plan, coordinate)]
    return mine[:, :-1], mine[:, 1:]


def my_part(plan: Plan, coordinate: Coordinate) -> slice:
    """This replica's rows of a global batch."""
    start = sum(replica.sequences for replica in plan.replicas[: coordinate.dp])
    return slice(start, start + plan.replicas[coordinate.dp].sequences)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def deviation(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference of a tensor, whole or split, from the expected one."""
    return float((whole(tensor.detach()) - expected).abs().max())


def job_loss(share: float, coordinate: Coordinate) -> float:
    total = torch.tensor([share if coordinate.tp == 0 else 0.0], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def run_equivalence(plan: Plan, spec: FamilySpec, rank: int, objective: AnyObjective = NEXT_TOKEN) -> dict[str, float]:
    """Largest deviations of a plan from one process, the same number on every rank; of losses as a share of them.
    'validation' compares with the training's loss, 'evaluation' with one process. Also 'early': minus the
    fewest sums that any rank began before its last action ended, and 'under way': minus the fewest that were on their
    way when an action of a rank ended."""
    expected = reference(spec, objective)
    pipeline, coordinate, reducer = open_pipeline(plan, spec, rank, objective)
    named = pipeline.parameters()
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-3, eps=EPS, fused=plan.tp == 1)  # as a worker's
    names = ("loss", "gradient", "norm", "validation", "evaluation", "parameter")
    found: dict[str, list[float]] = {key: [] for key in names}
    for step in range(STEPS):
        rows = [part[my_part(plan, coordinate)] for part in samples(spec, step, objective)]
        # Before any training, and after some of it.
        valid = job_loss(pipeline.evaluate(*rows), coordinate) if step in (0, STEPS - 1) else None
        with sums_and_actions(pipeline) as events:
            loss = float(pipeline.step(*rows))
        found["early"], found["under way"] = [-early_sums(events)], [-most_under_way(events, "action")]
        loss = job_loss(loss, coordinate)
        reducer.reduce(local_gradients([p for _, p in named]))
        pipeline.all_reduce_tied_gradients()
        if valid is not None:
            found["validation"].append(abs(valid - loss))
            found["evaluation"] += [abs(valid / expected["losses"][0] - 1)] if step == 0 else []
        found["loss"].append(abs(loss / expected["losses"][step] - 1))
        if step == 0:
            norm = float(gradient_norm([p for _, p in named], plan, pipeline.tied_holders()))
            found["norm"].append(abs(norm - expected["norm"]))
            found["gradient"] = [deviation(p.grad, expected["gradients"][name]) for name, p in named]
        optimizer.step()
        optimizer.zero_grad()
    fingerprint(named)  # copies on several ranks are equal bit by bit, or this is an error
    found["parameter"] = [deviation(p, expected["parameters"][name]) for name, p in named]
    return {key: largest(values) for key, values in found.items()}


def run_reshard(folder: Path, rank: int, world: int) -> dict[str, float]:
    """Load the checkpoint of each plan that saved one into the plans of this world size; compare tensor by tensor."""
    results = {}
    for saved in SAVED:
        expected = torch.load(folder / saved / "expected.pt", weights_only=True)
        found, _ = newest(folder / saved)
        assert found is not None
        errors = load_into_plans(found, expected, rank, world, PLANS[saved][1], few=saved in SHARDED)
        results.update({f"{saved} -> {name}": error for name, error in errors.items()})
    return results


def load_into_plans(
    found: VerifiedCheckpoint, expected: dict[str, torch.Tensor], rank: int, world: int, model: FamilySpec, few: bool
) -> dict[str, float]:
    """Largest difference of a loaded tensor from the expected one, by plan. The state lies the same way at every ZeRO
    level and under every schedule, so a few of the sharded plans are enough, and of all for further checkpoints."""
    results = {}
    for name, (plan, spec) in PLANS.items():
        if plan.world_size != world or spec is not model or any(stage.recompute != "none" for stage in plan.stages):
            continue
        if name not in FEW and (few or name in SHARDED):
            continue
        pipeline, _, _ = open_pipeline(plan, spec, rank, resolved_objective(None, spec))
        named = pipeline.parameters()
        optimizer = torch.optim.AdamW([p for _, p in named], foreach=False)
        prepare_moments(named, optimizer)
        tensors = collect(named, optimizer)
        for tensor in tensors.values():
            tensor.fill_(9.0)
        CheckpointReader(found.path).load(tensors, dist.group.WORLD)
        set_optimizer_step(named, optimizer, found.manifest.step)
        results[name] = largest([deviation(tensor, expected[key]) for key, tensor in tensors.items()])
    return results


def save_state(folder: Path, plan: Plan, spec: FamilySpec, rank: int) -> None:
    """Two steps on a plan, saved asynchronously; a third step must not reach the checkpoint."""
    objective = resolved_objective(None, spec)
    pipeline, coordinate, reducer = open_pipeline(plan, spec, rank, objective)
    named = pipeline.parameters()
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-3, foreach=False)
    prepare_moments(named, optimizer)
    saver = CheckpointSaver(folder, dist.new_group(backend="gloo"), keep=2, fence=Fence(folder / GENERATIONS, 0))
    for step in range(3):
        pipeline.step(*(part[my_part(plan, coordinate)] for part in samples(spec, step, objective)))
        reducer.reduce(local_gradients([p for _, p in named]))
        pipeline.all_reduce_tied_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            tensors = collect(named, optimizer)
            copies = {key: whole(tensor).clone() for key, tensor in tensors.items()}
            manifest = Manifest(
                step=2, generation=0, samples=2 * ROWS, seed=SEED, run_sha256="", model_sha256=spec.sha256(),
                world_size=plan.world_size, files=[],
            )  # fmt: skip
            saver.save(tensors, manifest)
    saved = saver.finished(wait=True)
    saver.close()
    assert saved is not None
    assert saved.error is None, saved.error
    everyone: list[dict[str, torch.Tensor]] = [{} for _ in range(plan.world_size)]
    dist.all_gather_object(everyone, copies)
    if rank == 0:
        torch.save({key: value for part in everyone for key, value in part.items()}, folder / "expected.pt")
    dist.barrier()


def equivalence(folder: Path, rank: int, world: int) -> dict[str, Any]:
    with process_group(folder, rank, world):
        here = {name: case for name, case in PLANS.items() if case[0].world_size == world}
        results = {name: run_equivalence(*case, rank, resolved_objective(None, case[1])) for name, case in here.items()}
        masked = {name: case for name, case in here.items() if name in HIDING}
        return results | {f"{name}, masked": run_equivalence(*case, rank, MASKED) for name, case in masked.items()}


HIDING = ("dp2 uneven", "tp2", "tp2 odd vocabulary", "pp2 tp2 sequence, tied")
"""Plans that are tried with masked targets too: the loss of some positions only, whole and split by vocabulary."""
SAVED = (
    "pp2 dp2 uneven", "zero3 dp2 tp2", "zero2 dp4 in pairs", "pp2 tp2 sequence, tied", "zero3 pp2 dp2, encoder-decoder",
)  # fmt: skip
FEW = (
    "one", "pp2 interleaved", "tp2", "dp2 tp2", "zero1 dp2", "zero1 dp2 tp2", "zero1 dp4 in pairs",
    "zero1 pp2 dp2 interleaved",
)  # fmt: skip


def save(folder: Path, rank: int, world: int) -> dict[str, Any]:
    with process_group(folder, rank, world):
        for name in SAVED:
            save_state(folder / name, *PLANS[name], rank)
    return {}


def load_all(folder: Path, rank: int, world: int) -> dict[str, Any]:
    with process_group(folder, rank, world):
        return run_reshard(folder, rank, world)


BODIES = {"equivalence": equivalence, "save": save, "load": load_all}

if __name__ == "__main__":
    launch(BODIES[sys.argv[1]], int(sys.argv[2]), sys.argv[3])
