"""What codecs keep between steps, over a change of plan and in snapshots. Called by the test beside it.

python codec_state_cases.py moved 4 FOLDER
python codec_state_cases.py fewer 8 FOLDER
python codec_state_cases.py snapshots 2 FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import HALF, PLANS, QUARTERS, SPEC, UNEVEN, WHOLE, by_level, make_plan
from loop_cases import StoppingOrders, leave, make_folder, open_trainer
from memory_cases import END, HALFWAY, MEMORY, same_bits, source_of, state_of, steps
from processes import launch
from real_text import TEXT

from hpctrain.agent.worker_messages import MemoryOrder, SnapshotMemory
from hpctrain.checkpoint.memory.segment import held_state
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.records.history.run_log import last_row_of_each_step, read_metrics
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.build import Trainer
from hpctrain.worker.loop import train

INT4 = {"mode": "int4"}
TOPK = {"mode": "topk", "density": 0.1, "warmup_steps": 1}
LOW_RANK = {"mode": "power_sgd", "rank": 2, "remainder": "int1", "warmup_steps": 1, "min_compression": 1}
NO_HEAD = {"mode": "int4", "layers": ["layers.*"]}
WIDE = SPEC.model_copy(update={"dim": 64, "vocab": 320, "tied": True})
Case = tuple[Plan, Plan, set[int]]


def case(codec: dict[str, Any], old: Plan, new: Plan, lost: set[int], other: dict[str, Any] | None = None) -> Case:
    """The plan before and after, with a codec, and the old ranks of which no node has the state any more."""
    specs = [CodecSpec.model_validate({"codec": chosen}) for chosen in (codec, other or codec)]
    first, then = (plan.model_copy(update={"compression": [s]}) for plan, s in zip((old, new), specs, strict=True))
    return first, then, lost


FOUR, THREE = make_plan(1, 4, 1, WHOLE, [(2, 1)] * 4), make_plan(1, 3, 1, WHOLE, [(3, 1), (3, 1), (2, 1)])
FIVE = make_plan(1, 5, 1, WHOLE, [(2, 1), (2, 1), (2, 1), (1, 1), (1, 1)])
MOVED: dict[str, Case] = {
    "4 -> 3": case(INT4, FOUR, THREE, {1}),
    "4 -> 3, none lost": case(TOPK, FOUR, THREE, set()),
    "4 -> 3, low rank": case(LOW_RANK, FOUR, THREE, {3}),
    "pp2 dp2 uneven -> dp3": case(INT4, PLANS["pp2 dp2 uneven"][0], THREE, {0}),
    "dp2 tp2 -> pp2 dp2": case(INT4, PLANS["dp2 tp2"][0], make_plan(2, 2, 1, HALF, [(2, 2), (2, 2)]), {1, 2}),
    "pp2 dp2 -> dp2 tp2": case(TOPK, make_plan(2, 2, 1, UNEVEN, [(2, 2), (2, 2)]), PLANS["dp2 tp2"][0], set()),
    "by level -> 3": (
        make_plan(1, 4, 1, WHOLE, [(2, 1)] * 4, **by_level(mode="int4")), case(INT4, FOUR, THREE, set())[1], {1},
    ),
    "pp2 dp2 -> by level": (
        case(INT4, PLANS["pp2 dp2 uneven"][0], FOUR, set())[0],
        make_plan(1, 4, 1, WHOLE, [(2, 1)] * 4, **by_level("bf16", mode="int4")),
        set(),
    ),
    "a spare": case(INT4, FOUR, FOUR.model_copy(update={"ranks": FOUR.ranks[::-1]}), {2}),
    "another codec": case(INT4, FOUR, THREE, {1}, {"mode": "int8"}),
    "one replica": case(INT4, FOUR, make_plan(4, 1, 1, QUARTERS, [(2, 4)]), set()),
    "sharded": case(INT4, FOUR.model_copy(update={"zero": 1}), THREE.model_copy(update={"zero": 1}), set()),
}  # fmt: skip
FEWER: dict[str, Case] = {
    "8 -> 5": case(INT4, make_plan(1, 8, 1, WHOLE, [(1, 1)] * 8), FIVE, {1, 4, 6}),
    "8 -> 5, pp2 dp2 tp2": case(TOPK, make_plan(2, 2, 2, UNEVEN, [(2, 2), (2, 2)]), FIVE, {0, 3, 5}),
}


def residuals_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole parameter -> this rank's residual, with zeros outside of its part; equal on tensor-parallel ranks that have
    the same part."""
    assert trainer.live is not None
    state, found = trainer.reducer.state(), {}
    at, parts = trainer.coordinate, trainer.plan.part_replicas
    for number, entry in enumerate(trainer.live.segment.index.entries):
        residual = state.get(f"residual.{number}")
        if residual is None or residual.numel() != entry.numel // parts:
            continue
        whole = torch.zeros(entry.shape, dtype=torch.float64)
        places = [slice(a, a + n) for a, n in zip(entry.chunk_offsets, entry.chunk_shape, strict=True)]
        # By level, a rank keeps the residual of one of as many equal parts of its rows.
        whole[tuple(places)].chunk(parts)[at.dp % parts].copy_(residual.view(-1, *entry.chunk_shape[1:]))
        found[f"{at.pp} {at.dp} {entry.chunk_offsets} {entry.name}"] = whole
    return found


def sums(everyone: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Parameter -> the sum of all residuals."""
    parts = {key: whole for one in everyone for key, whole in one.items()}
    totals: dict[str, torch.Tensor] = {}
    for key, whole in parts.items():
        name = key.split(" ")[-1]
        totals[name] = totals.get(name, torch.zeros(())) + whole
    return totals


def data_of(place: Path) -> list[tuple[int, float | None]]:
    return [(row.step, row.loss) for row in last_row_of_each_step(read_metrics(place / "metrics.jsonl"))]


def over_a_change_of_plan(cases: dict[str, Case], folder: Path, rank: int, world: int) -> dict[str, Any]:
    """The sum of all residuals before and after."""
    meeting = dist.FileStore(str(folder / "meeting"), world)
    found: dict[str, Any] = {}
    for name, (old, new, lost) in cases.items():
        place = folder / name
        if rank < old.world_size:
            trainer = open_trainer(place, old, 0, None, rank, meeting, MemoryOrder(live=MEMORY[name, "old", rank]))
            steps(trainer, HALFWAY)
            torch.save(residuals_of(trainer) if rank not in lost else {}, place / f"before-{rank}")
            dist.barrier()
            leave()
        if rank >= new.world_size:
            continue
        mine = [MEMORY[name, "old", r] for r in range(old.world_size) if r % new.world_size == rank and r not in lost]
        source = source_of(old, "plan-0.json")
        source = source.model_copy(update={"holders": [holder for holder in source.holders if holder.rank not in lost]})
        order = MemoryOrder(live=MEMORY[name, "new", rank], source=source, segments=tuple(mine))
        trainer = open_trainer(place, new, 1, None, rank, meeting, order)
        kept, offered = trainer.reducer.state(), residuals_of(trainer)
        everyone: list[Any] = [None] * new.world_size
        dist.all_gather_object(everyone, (offered, {key for key in kept if key.startswith("step")}))
        before = sums([torch.load(place / f"before-{r}") for r in range(old.world_size)])
        after = sums([residuals for residuals, _ in everyone])
        train(trainer, StoppingOrders(END))  # type: ignore[arg-type]
        leave()
        found[name] = {
            "dropped": trainer.residuals_dropped,
            "before": sum(float(total.abs().sum()) > 0 for total in before.values()),
            "unequal": [
                key for key in before if key not in after or not torch.allclose(before[key], after[key], atol=1e-6)
            ],
            "counts": sorted({key for _, counts in everyone for key in counts}),
            "steps": [step for step, _ in data_of(place)],
        }
    return found


def moved(folder: Path, rank: int, world: int) -> dict[str, Any]:
    return over_a_change_of_plan(MOVED, folder, rank, world)


def fewer(folder: Path, rank: int, world: int) -> dict[str, Any]:
    return over_a_change_of_plan(FEWER, folder, rank, world)


SHARDED = make_plan(1, 2, 1, WHOLE, [(2, 2), (2, 2)], zero=1, compression=[CodecSpec.model_validate({"codec": INT4})])


def from_snapshots(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """A sharded run whose nodes are both replaced half way: each new rank maps the other one's snapshot."""
    meeting = dist.FileStore(str(folder / "meeting"), world)
    trainer = open_trainer(folder / "straight", SHARDED, 0, None, rank, meeting)
    steps(trainer, END)
    expected, kept = state_of(trainer), {key: part.clone() for key, part in trainer.reducer.state().items()}
    leave()
    place = folder / "snapshots"
    own = (MEMORY["own", "old", rank], MEMORY["own", "new", rank])
    guest = (MEMORY["guest", "old", rank], MEMORY["guest", "new", rank])
    memory = (SnapshotMemory(rank=rank, descriptors=own), SnapshotMemory(rank=1 - rank, descriptors=guest))
    order = MemoryOrder(live=MEMORY["live", "old", rank], snapshots=memory)
    trainer = open_trainer(place, SHARDED, 0, None, rank, meeting, order)
    steps(trainer, HALFWAY)
    leave()
    held = {state.step: fd for fd in guest if (state := held_state(fd, "guest")) is not None}
    source = source_of(SHARDED, "plan-0.json")
    order = MemoryOrder(live=MEMORY["live", "new", rank], source=source, segments=(held[HALFWAY],))
    trainer = open_trainer(place, SHARDED, 1, None, rank, meeting, order)
    steps(trainer, END)
    found = {
        "unequal": same_bits(expected, state_of(trainer)) + same_bits(kept, trainer.reducer.state()),
        "compared": len(expected) + len(kept),
        "dropped": trainer.residuals_dropped,
        "rows": data_of(folder / "straight") == data_of(place),
    }
    leave()
    return {"snapshots": found}


def main(what: str, world: int, folder: Path) -> None:
    data = folder / "data"
    prepare([TEXT], data, PrepareOptions(valid_fraction=0.1, limit_bytes=200_000))
    model = {"dims": WIDE.model_dump(exclude_none=True)}
    bodies = {"moved": moved, "fewer": fewer, "snapshots": from_snapshots}
    cases = {"moved": [*MOVED], "fewer": [*FEWER], "snapshots": ["straight", "snapshots"]}[what]
    for name in cases:
        changes = {"recovery": {"snapshot_every": 1}} if name == "snapshots" else {}
        make_folder(folder / name, data, model=model, validation={"every": 100}, **changes)
    for name in [*cases, "own", "guest", "live"]:
        for which in ("old", "new"):
            for rank in range(world):
                MEMORY[name, which, rank] = os.memfd_create("state")
    launch(bodies[what], world, str(folder))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
