"""Every codec as a reducer of gradients, within a sharded state, and in training. Called by the test beside it.

python codec_cases.py all 4 FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import (
    EVEN,
    FOUR,
    HALF,
    QUARTERS,
    SPEC,
    WHOLE,
    batch,
    by_level,
    deviation,
    make_plan,
    my_rows,
    open_pipeline,
    whole,
)
from flight_cases import beside_waiting, lost_rank
from gloo_calls import all_to_all_share, gloo_calls
from loop_cases import StoppingOrders, leave, make_folder, open_trainer
from message_cases import ROUNDED, beside_full
from processes import largest, launch, process_group
from real_text import TEXT
from scatter_cases import conserved, representable
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from wire_cases import MIXED, dense_wire, exact_sums, mixed_wire, pairs_of_ranks, planned_by_level

from hpctrain.checkpoint.state import collect
from hpctrain.compress.build import build_reducer
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.parallel.gradients import local_gradients
from hpctrain.parallel.mesh import Coordinate
from hpctrain.records.history.manifest import LossScale
from hpctrain.records.history.run_log import read_metrics
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.rotated import RotatedIntegers
from hpctrain.worker.build import reducer_state_tensors
from hpctrain.worker.loop import train

SHAPES = {"layers.0.mlp.up.weight": (96, 64), "layers.0.attention.q.weight": (64, 64), "norm.weight": (64,)}
CODECS: dict[str, dict[str, Any]] = {
    "bf16": {"mode": "bf16"},
    "bf16, without attention": {"mode": "bf16", "layers": "non_attention"},
    **{mode: {"mode": mode} for mode in (*Quantized.modes(), *RotatedIntegers.modes())},
    "topk, all of it": {"mode": "topk", "density": 1, "selector": "exact", "values": "fp32", "warmup_steps": 0},
    "tagc, all of it": {"mode": "tagc", "density": 1, "layers": "all", "warmup_steps": 0},
    "power_sgd, whole rank": {"mode": "power_sgd", "rank": 64, "min_compression": 1, "warmup_steps": 0},
}
ROTATED = "rotated_int3"
LOW_RANK = {"mode": "power_sgd", "rank": 2, "remainder": "int2", "warmup_steps": 1}
ADAPTIVE = {"mode": "adaptive", "warmup_steps": 1}
LOCAL = {"mode": "local_steps", "every": 2}
ALL_OF_IT = {"mode": "topk", "density": 1, "selector": "exact", "values": "fp32", "warmup_steps": 0}
SOME_OF_IT = {"mode": "topk", "density": 0.1, "warmup_steps": 1}
SPARSE_SCATTERS = {
    "warm-up and bf16": SOME_OF_IT,
    "values of int8": {**SOME_OF_IT, "values": "int8"},
    "profiles": {"mode": "adaptive", "warmup_steps": 2, "reprofile_every": 3},
    "flush": {**SOME_OF_IT, "reset": "flush", "reset_every": 4},
    "tagc": {"mode": "tagc", "density": 0.1, "warmup_steps": 1, "layers": "all"},
    "tagc, sketch": {"mode": "tagc", "density": 0.1, "warmup_steps": 1, "layers": "all", "ratio": 4},
}
ONE_EACH = [(2, 1)] * 4
WIDE = SPEC.model_copy(update={"dim": 64, "vocab": 320})
BY_LEVEL: dict[str, dict[str, Any]] = {
    "exact, int4": {"codec": {"mode": "int4"}, "intra": "none"},
    "bf16, power_sgd": {"codec": {"mode": "power_sgd", "rank": 2, "warmup_steps": 0}, "intra": "bf16"},
    "bf16, exact, zero 1": {"codec": {"mode": "none"}, "intra": "bf16", "zero": 1},
    "bf16, mixed, zero 2, hybrid": {
        "codec": {"mode": "mixed", "groups": [{"mode": "bf16", "layers": group} for group in MIXED]},
        "intra": "bf16",
        "zero": 2,
        "shard": 2,
    },
    "exact, int8, zero 3": {"codec": {"mode": "int8"}, "intra": "none", "zero": 3},
    "bf16, bf16, zero 2, hybrid": {"codec": {"mode": "bf16"}, "intra": "bf16", "zero": 2, "shard": 2},
}
"""Arguments of `sharded`, by the codec within nodes and the codec between them."""
RUNS = {
    "low rank": (LOW_RANK, 0), "adaptive": (ADAPTIVE, 0), "sharded": (ADAPTIVE, 1),
    "integers, sharded": ({"mode": "int8"}, 2), "local steps": (LOCAL, 0),
}  # fmt: skip
"""Codec, and level of sharding over both replicas."""
END = 4


def spec_of(codec: dict[str, Any]) -> CodecSpec:
    return CodecSpec.model_validate({"codec": codec})


def sums(codec: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Two reductions by a codec: how far each tensor is from the sum, as a share of its largest number, whether all
    ranks have the same bits, and bytes as counted and as gloo reports them."""
    shapes = [torch.Size(shape) for shape in SHAPES.values()]
    reducer = build_reducer(dist.group.WORLD, list(SHAPES), shapes, spec_of(codec))
    far = {}
    for step in range(2):
        everyone = [
            [torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + member)) for shape in shapes]
            for member in range(world)
        ]
        mine = [tensor.clone() for tensor in everyone[rank]]
        mine[0] = mine[0].t().contiguous().t()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            counted = reducer.reduce(mine)
        expected = [torch.stack(tensors).double().sum(0) for tensors in zip(*everyone, strict=True)]
        for name, found, exact in zip(SHAPES, mine, expected, strict=True):
            far[name] = largest([deviation(found.double(), exact) / float(exact.abs().max())])
    flat = torch.cat([tensor.flatten() for tensor in mine])
    first = flat.clone()
    dist.broadcast(first, 0)
    calls = gloo_calls(trace)
    broken = [tensor.clone() for tensor in everyone[rank]]
    if rank == 1:
        broken[0][0, 0] = float("inf")
    reducer.reduce(broken)
    return {
        "far": far,
        "differ": largest([float(not torch.equal(flat, first))]),
        "counted": counted,
        "calls": sorted({call.kind for call in calls}),
        "all-to-all": all_to_all_share(calls, world),
        "infinite seen by": int(whole_sum(float(not broken[0].isfinite().all()))),
    }


def whole_sum(value: float) -> float:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return float(total)


def sharded(
    codec: dict[str, Any],
    rank: int,
    cuts: list[tuple[int, int]] = WHOLE,
    shares: list[tuple[int, int]] = FOUR,
    intra: str | None = None,
    **further: Any,
) -> dict[str, Any]:
    """A step with a codec beside the same without: deviation of the gradient as a share of its largest number, and the
    bytes of both as shares of the whole model's. With `intra`, the codec sums between nodes of two."""
    plain = make_plan(1, 4, 1, cuts, shares, per_node=2, **further)
    plan = plain.model_copy(update={"compression": [spec_of(codec)]})
    if intra is not None:
        plan = make_plan(1, 4, 1, cuts, shares, **by_level(intra, **codec), **further)
    results, sent = [], []
    for each in (plain, plan):
        pipeline, coordinate, reducer = open_pipeline(each, WIDE, rank)
        pipeline.step(*my_rows(each, coordinate, batch(WIDE, 0)))
        parameters = [parameter for _, parameter in pipeline.parameters()]
        sent.append(reducer.reduce(local_gradients(parameters)) / (4 * WIDE.parameters()))
        results.append([whole(parameter.grad) for parameter in parameters])
        levels = reducer.level_bytes
    expected, found = results
    size = max(float(grad.abs().max()) for grad in expected)
    return {
        "far": largest([deviation(a, b) / size for a, b in zip(found, expected, strict=True)]),
        "levels": levels and [part / (4 * WIDE.parameters()) for part in levels],
        "bytes": sent,
    }


def trained(place: Path, parts: list[tuple[Plan, int]], rank: int, meeting: dist.Store) -> dict[str, Any]:
    """Train in these parts, each from the checkpoint of the one before; losses, what was dropped, the last state."""
    step, dropped = 0, []
    for generation, (plan, last) in enumerate(parts):
        restore = f"checkpoints/step-{step:08}" if step else None
        trainer = open_trainer(place, plan, generation, restore, rank, meeting)
        dropped.append(trainer.residuals_dropped)
        train(trainer, StoppingOrders(last))  # type: ignore[arg-type]
        step = trainer.step
        kept = reducer_state_tensors(trainer.reducer, Coordinate.of(plan, rank))
        collected = {**collect(trainer.pipeline.parameters(), trainer.optimizer), **kept}
        state = {key: part.to_local() if isinstance(part, DTensor) else part for key, part in collected.items()}
        leave()
    rows = read_metrics(place / "metrics.jsonl")
    return {
        "losses": [row.loss for row in rows],
        "dp": [row.bytes_sent.dp for row in rows],
        "figures": [row.compression and row.compression.to_json() for row in rows],
        "dropped": dropped,
        "kept": len(kept),
        "state": state,
    }


def training(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Runs in one go and in two parts, by codec."""
    meeting = dist.FileStore(str(folder / "meeting"), world)
    found: dict[str, Any] = {}
    unequal: dict[str, list[float]] = {}
    for name, (codec, zero) in RUNS.items():
        plan = make_plan(2, 2, 1, HALF, EVEN, compression=[spec_of(codec)], zero=zero)
        straight = trained(folder / f"{name}, straight", [(plan, END)], rank, meeting)
        resumed = trained(folder / f"{name}, resumed", [(plan, END // 2), (plan, END)], rank, meeting)
        pairs = [(straight["state"].pop(key), value) for key, value in resumed.pop("state").items()]
        # Moments of AdamW are each replica's own where they train on their own; a checkpoint has one replica's.
        unequal[name] = [float(not torch.equal(a, b)) for a, b in pairs] if name != "local steps" else []
        found[name] = {"straight": straight, "resumed": resumed, "missing": list(straight.pop("state"))}
    moved = make_plan(1, 4, 1, WHOLE, FOUR, compression=[spec_of(LOW_RANK)])
    plan = make_plan(2, 2, 1, HALF, EVEN, compression=[spec_of(LOW_RANK)])
    other = trained(folder / "moved", [(plan, END // 2), (moved, END)], rank, meeting)
    found["fp16"] = overflowing(folder / "fp16", rank, meeting)
    found["moved"] = {"dropped": other["dropped"], "losses": other["losses"]}
    dist.init_process_group("gloo", store=dist.PrefixStore("last", meeting), rank=rank, world_size=world)
    for name in ("low rank", "adaptive", "sharded", "integers, sharded"):
        found[name]["unequal"] = largest(unequal[name])
    leave()
    return found


def overflowing(place: Path, rank: int, meeting: dist.Store) -> dict[str, Any]:
    """Steps in fp16 with a scale that is too large at first: which were skipped, and how many the reducer counted."""
    plan = make_plan(2, 2, 1, HALF, EVEN, compression=[spec_of(LOW_RANK)])
    trainer = open_trainer(place, plan, 0, None, rank, meeting)
    assert trainer.scaler is not None
    trainer.scaler.state = LossScale(value=2.0**22)
    # How far the scale has to fall depends on the text.
    train(trainer, StoppingOrders(3 * END))  # type: ignore[arg-type]
    leave()
    kept = trainer.reducer.state()
    return {
        "skipped": [row.skipped for row in read_metrics(place / "metrics.jsonl")],
        "counted": int(kept["steps"]),
        "finite": all(bool(tensor.isfinite().all()) for tensor in kept.values()),
    }


def every_case(folder: Path, rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with process_group(folder, rank, world):
        for name, codec in CODECS.items():
            found[name] = sums(codec, rank, world)
        for mode in ("bf16", *Quantized.modes(), ROTATED):
            found[f"dense, {mode}"] = dense_wire(mode, rank)
        found["dense, int4, by level"] = dense_wire("int4", rank, pairs_of_ranks(rank, world))
        found["mixed"] = mixed_wire(rank)
        found["bench, auto"] = planned_by_level(rank)
        for name, further in BY_LEVEL.items():
            found[f"by level, {name}"] = sharded(rank=rank, **further)
        found["exact sums"] = exact_sums(rank)
        found["sharded over all"] = sharded({"mode": "bf16"}, rank, zero=2)
        # The stages in the middle have no parameters beside those of their blocks.
        stages = {"cuts": QUARTERS, "schedule": "interleaved_1f1b"}
        for zero in (1, 2, 3):
            found[f"sharded, all of it, zero {zero}"] = sharded(ALL_OF_IT, rank, shares=ONE_EACH, zero=zero, **stages)
        for name, codec in SPARSE_SCATTERS.items():
            found[name] = conserved(codec, rank, world)
        gate, nodes = dist.new_group(), pairs_of_ranks(rank, world)
        for mode in ("none", "bf16", *Quantized.modes(), ROTATED):
            found[f"in flight, {mode}"] = beside_waiting({"mode": mode}, rank, gate)
        for mode in ("none", "int4"):
            found[f"in flight, {mode} by level"] = beside_waiting({"mode": mode}, rank, gate, nodes)
        for name in SPARSE_SCATTERS:
            # The sizes of a module's messages arrive before the next module is begun, and an index before anything.
            alone = () if "tagc" in name else (2,)
            found[f"in flight, {name}"] = beside_waiting(SPARSE_SCATTERS[name], rank, gate, alone=alone)
        for name in ROUNDED:
            found[f"messages, {name}"] = beside_full(name, rank)
        for mode in Quantized.modes():
            found[f"parts, {mode}"] = conserved({"mode": mode}, rank, world) | {
                "representable": representable({"mode": mode}, rank, world)
            }
        found[f"parts, {ROTATED}"] = conserved({"mode": ROTATED}, rank, world)
        found["integers, zero 1"] = sharded({"mode": "int4"}, rank, zero=1, **stages)
        found["integers, zero 3"] = sharded({"mode": "int8"}, rank, zero=3)
        groups = [{"mode": "int8", "layers": group} for group in MIXED]
        for codec in ({"mode": "bf16"}, {"mode": "int8"}, {"mode": "mixed", "groups": groups}):
            found[f"whole, four stages, {codec['mode']}"] = sharded(codec, rank, **stages)
        found["sharded in pairs"] = sharded({"mode": "bf16"}, rank, zero=1, shard=2)
        found["lost rank"] = lost_rank(rank)
    return found | training(folder, rank, world)


def main(world: int, folder: Path) -> None:
    data = folder / "data"
    prepare([TEXT], data, PrepareOptions(valid_fraction=0.1, limit_bytes=200_000))
    model = {"dims": WIDE.model_dump(exclude_none=True)}
    for name in RUNS:
        make_folder(folder / f"{name}, straight", data, model=model)
        make_folder(folder / f"{name}, resumed", data, model=model)
    make_folder(folder / "moved", data, model=model)
    make_folder(folder / "fp16", data, model=model, precision="fp16")
    launch(every_case, world, str(folder))


if __name__ == "__main__":
    main(int(sys.argv[2]), Path(sys.argv[3]))
