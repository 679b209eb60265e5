"""Runs many cases in one launch of processes and prints a JSON result a case; called by the tests beside it.

python cases.py equivalence WORLD FOLDER   every plan of that many ranks against one process
python cases.py save 4 FOLDER; python cases.py load WORLD FOLDER   save on one plan, load on all others
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import largest, launch, process_group
from torch.distributed.tensor import DTensor

from hpctrain.compress.reducer import DenseReducer
from hpctrain.model.build import build_stage
from hpctrain.parallel.gradients import gradient_norm, local_gradients
from hpctrain.parallel.mesh import Coordinate, build_mesh
from hpctrain.parallel.pipeline import Pipeline, PipelineInputs, build_pipeline
from hpctrain.records.manifest import Manifest
from hpctrain.records.model_spec import ModelSpec
from hpctrain.records.plan import Plan, Replica, Stage
from hpctrain.schedule.resolve import schedule_of
from hpctrain.snapshot.checkpoint import CheckpointSaver, load
from hpctrain.snapshot.published import newest
from hpctrain.snapshot.state import collect, prepare_moments, set_optimizer_step

SPEC = ModelSpec(layers=4, dim=32, heads=4, kv_heads=2, vocab=64)
ODD = SPEC.model_copy(update={"vocab": 67})
"""A vocabulary that tensor parallelism cannot split evenly."""
SEQ, ROWS, SEED, STEPS = 16, 8, 7, 5


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
) -> Plan:
    """A plan by its degrees: `shares` are (micro_batch, micro_batches) of replicas, `order` the device of each rank."""
    devices = [f"local{index}:cpu0" for index in range(pp * dp * tp)]
    owner = owner or [stage % pp for stage in range(len(cuts))]

    def row(stage: int, replica: int) -> list[str]:
        return [devices[(owner[stage] * dp + replica) * tp + part] for part in range(tp)]

    replicas = [
        Replica(
            rows=size * count,
            micro_batch=size,
            micro_batches=count,
            devices=[row(stage, index) for stage in range(len(cuts))],
        )
        for index, (size, count) in enumerate(shares)
    ]
    return Plan(
        pp=pp, dp=dp, tp=tp, schedule=schedule, stages=[Stage(layers=cut) for cut in cuts], replicas=replicas,
        ranks=[devices[index] for index in order or range(len(devices))], actions=actions or {},
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
CUSTOM = {0: {0: ["0F0", "0F1", "2F0", "2F1", "2B1", "2B0", "0B1", "0B0"], 1: ["1F0", "1F1", "1B1", "1B0"]}}

DEEP = SPEC.model_copy(update={"layers": 8})
EIGHTHS, FIFTHS = [(i, i + 1) for i in range(8)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4)]
V_ENDS = [(0, 0), (0, 2), (2, 4), (4, 4)]
FIVE_STAGES = {
    0: {
        0: "0F0 0F1 2F0 2F1 4F0 4I0 4F1 4B1 2I0 2B1 4W0 0B0 0B1 2W0".split(),
        1: "1F0 1F1 3F0 3F1 3B0 3I1 1B0 3W1 1B1".split(),
    }
}
"""Stages of one block, and one with the head alone; backwards cut in two for some of them only."""

PLANS: dict[str, tuple[Plan, ModelSpec]] = {
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
}  # fmt: skip


def batch(spec: ModelSpec, step: int) -> torch.Tensor:
    """The global batch of a step: [ROWS, SEQ + 1]."""
    return torch.randint(0, spec.vocabulary, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))


def reference(spec: ModelSpec) -> dict[str, object]:
    """One process, whole batch, no hpctrain wiring: losses, first gradients, parameters after STEPS steps."""
    model = build_stage(spec, 0, spec.layers, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], {}
    for step in range(STEPS):
        tokens = batch(spec, step)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    norm = float(torch.stack([g.double().pow(2).sum() for g in gradients.values()]).sum().sqrt())
    return {"losses": losses, "gradients": gradients, "norm": norm, "parameters": dict(model.named_parameters())}


def open_pipeline(plan: Plan, spec: ModelSpec, rank: int) -> tuple[Pipeline, Coordinate, DenseReducer]:
    """This rank's part of a plan."""
    coordinate, mesh = Coordinate.of(plan, rank), build_mesh(plan, "cpu")
    schedule, _ = schedule_of(plan, coordinate.dp)
    inputs = PipelineInputs(plan, spec, schedule, SEQ, SEED, torch.device("cpu"))
    return build_pipeline(inputs, mesh, coordinate), coordinate, DenseReducer(mesh.get_group("dp"))


def my_rows(plan: Plan, coordinate: Coordinate, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This replica's part of a global batch."""
    start = sum(replica.rows for replica in plan.replicas[: coordinate.dp])
    mine = tokens[start : start + plan.replicas[coordinate.dp].rows]
    return mine[:, :-1], mine[:, 1:]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def deviation(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference of a tensor, whole or split, from the expected one."""
    return float((whole(tensor.detach()) - expected).abs().max())


def job_loss(share: float, coordinate: Coordinate) -> float:
    total = torch.tensor([share if coordinate.tp == 0 else 0.0], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def run_equivalence(plan: Plan, spec: ModelSpec, rank: int) -> dict[str, float]:
    """Largest deviations of a plan from one process, the same number on every rank."""
    expected = reference(spec)
    pipeline, coordinate, reducer = open_pipeline(plan, spec, rank)
    named = pipeline.parameters()
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-3, foreach=False if plan.tp > 1 else None)
    found: dict[str, list[float]] = {key: [] for key in ("loss", "gradient", "norm", "validation", "parameter")}
    for step in range(STEPS):
        rows = my_rows(plan, coordinate, batch(spec, step))
        valid = job_loss(pipeline.evaluate(*rows), coordinate)
        loss = job_loss(pipeline.step(*rows), coordinate)
        reducer.reduce(local_gradients([p for _, p in named]))
        found["validation"].append(abs(valid - loss))
        found["loss"].append(abs(loss - expected["losses"][step]))
        if step == 0:
            norm = gradient_norm([p for _, p in named], plan)
            found["norm"].append(abs(norm - expected["norm"]))
            found["gradient"] = [deviation(p.grad, expected["gradients"][name]) for name, p in named]
        optimizer.step()
        optimizer.zero_grad()
    found["parameter"] = [deviation(p, expected["parameters"][name]) for name, p in named]
    return {key: largest(values) for key, values in found.items()}


def run_reshard(folder: Path, rank: int, world: int) -> dict[str, float]:
    """Load the newest checkpoint into each plan of this world size and compare tensor by tensor with the expected."""
    expected = torch.load(folder / "expected.pt", weights_only=True)
    found, _ = newest(folder)
    assert found is not None
    results = {}
    for name, (plan, spec) in PLANS.items():
        if plan.world_size != world or spec is not SPEC:
            continue
        pipeline, _, _ = open_pipeline(plan, spec, rank)
        named = pipeline.parameters()
        optimizer = torch.optim.AdamW([p for _, p in named], foreach=False)
        prepare_moments(named, optimizer)
        tensors = collect(named, optimizer)
        for tensor in tensors.values():
            tensor.fill_(9.0)
        load(tensors, found.path, dist.group.WORLD)
        set_optimizer_step(named, optimizer, found.manifest.step)
        results[name] = largest([deviation(tensor, expected[key]) for key, tensor in tensors.items()])
    return results


def save_state(folder: Path, plan: Plan, spec: ModelSpec, rank: int) -> None:
    """Two steps on a plan, saved asynchronously; a third step must not reach the checkpoint."""
    pipeline, coordinate, reducer = open_pipeline(plan, spec, rank)
    named = pipeline.parameters()
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-3, foreach=False)
    prepare_moments(named, optimizer)
    saver = CheckpointSaver(folder, dist.new_group(backend="gloo"), keep=2)
    for step in range(3):
        pipeline.step(*my_rows(plan, coordinate, batch(spec, step)))
        reducer.reduce(local_gradients([p for _, p in named]))
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
        return {
            name: run_equivalence(plan, spec, rank) for name, (plan, spec) in PLANS.items() if plan.world_size == world
        }


def save(folder: Path, rank: int, world: int) -> dict[str, Any]:
    with process_group(folder, rank, world):
        save_state(folder, *PLANS["pp2 dp2 uneven"], rank)
    return {}


def load_all(folder: Path, rank: int, world: int) -> dict[str, Any]:
    with process_group(folder, rank, world):
        return run_reshard(folder, rank, world)


BODIES = {"equivalence": equivalence, "save": save, "load": load_all}

if __name__ == "__main__":
    launch(BODIES[sys.argv[1]], int(sys.argv[2]), sys.argv[3])
