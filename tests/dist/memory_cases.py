"""Runs whose state lies in memory that outlives the processes, beside runs whose state does not. Called by the test
beside it.

python memory_cases.py same 2 FOLDER     train, start again from memory on the same plan
python memory_cases.py other 4 FOLDER    start again from memory on another plan, and from a checkpoint
python memory_cases.py fewer 8 FOLDER    eight ranks, then five
python memory_cases.py snapshots 2 FOLDER   start again from snapshots after the loss of a node
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import HALF, PLANS, QUARTERS, SPEC, TIED, UNEVEN, WHOLE, make_plan
from loop_cases import StoppingOrders, leave, make_folder, open_trainer
from processes import launch
from real_text import TEXT
from resume_cases import add_dropout

from hpctrain.agent.worker_messages import MemoryOrder, SnapshotMemory
from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoint.memory.live_state import LiveState
from hpctrain.checkpoint.memory.mapping import MappedSegment
from hpctrain.checkpoint.memory.restore import load_from_segments
from hpctrain.checkpoint.memory.segment import held_state, read_header, read_state
from hpctrain.checkpoint.state import collect
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.records.history.manifest import LossScale, Manifest
from hpctrain.records.history.memory_state import MemorySource, StateHolder
from hpctrain.records.history.run_log import last_row_of_each_step, read_metrics
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.build import Trainer
from hpctrain.worker.loop import train
from hpctrain.worker.state_memory import MemoryUnusableError

HALFWAY, END = 2, 4
MODEL = SPEC.model_copy(update={"vocab": 320})
TIED_MODEL = TIED.model_copy(update={"vocab": 320})
TOO_LARGE = 2.0**20
"""A loss scale with which the first steps overflow."""


def coded(**codec: Any) -> Plan:
    spec = CodecSpec.model_validate({"codec": codec})
    return make_plan(1, 2, 1, WHOLE, [(2, 2), (2, 2)], compression=[spec])


def sharded(zero: int, **codec: Any) -> Plan:
    extra = {"compression": [CodecSpec.model_validate({"codec": codec})]} if codec else {}
    return make_plan(1, 2, 1, WHOLE, [(2, 2), (2, 2)], zero=zero, **extra)


SAME: dict[str, tuple[Plan, dict[str, Any]]] = {
    "dp2 uneven": (PLANS["dp2 uneven"][0], {}),
    "dp2 tied": (PLANS["dp2 tied"][0], {"model": {"dims": TIED_MODEL.model_dump(exclude_none=True)}}),
    "pp2 V": (PLANS["pp2 V"][0], {}),
    "pp2 tied": (PLANS["pp2 tied"][0], {"model": {"dims": TIED_MODEL.model_dump(exclude_none=True)}}),
    "tp2 sequence, two stages, tied": (
        PLANS["tp2 sequence, two stages, tied"][0], {"model": {"dims": TIED_MODEL.model_dump(exclude_none=True)}},
    ),
    "zero1": (sharded(1), {}),
    "zero2": (sharded(2), {}),
    "zero3": (sharded(3), {}),
    "zero1, integers": (sharded(1, mode="int4"), {}),
    "power_sgd": (coded(mode="power_sgd", rank=2, warmup_steps=1, min_compression=1), {}),
    "topk": (coded(mode="topk", density=0.1, warmup_steps=1), {}),
    "tagc": (coded(mode="tagc", warmup_steps=1), {}),
    "fp16": (PLANS["pp2 uneven"][0], {"precision": "fp16"}),
    "fp16, topk": (coded(mode="topk", density=0.1, warmup_steps=1), {"precision": "fp16"}),
}  # fmt: skip
OTHER: dict[str, tuple[Plan, Plan]] = {
    "4 -> 3": (make_plan(1, 4, 1, WHOLE, [(2, 1)] * 4, zero=1), make_plan(1, 3, 1, WHOLE, [(3, 1), (3, 1), (2, 1)])),
    "4 -> 3, sharded": (
        make_plan(1, 4, 1, WHOLE, [(2, 1)] * 4, zero=3), make_plan(1, 3, 1, WHOLE, [(3, 1), (3, 1), (2, 1)], zero=2)
    ),
    "pp2 tp2 -> pp4": (PLANS["pp2 tp2"][0], PLANS["pp4"][0]),
    "pp2 dp2 uneven -> dp2 tp2": (PLANS["pp2 dp2 uneven"][0], PLANS["dp2 tp2"][0]),
    "zero1 pp2 dp2 -> tp2": (make_plan(2, 2, 1, UNEVEN, [(2, 3), (1, 2)], zero=1), PLANS["tp2"][0]),
    "dp2 tp2 -> pp2": (PLANS["dp2 tp2"][0], make_plan(2, 1, 1, HALF, [(2, 4)])),
}  # fmt: skip
FEWER: dict[str, tuple[Plan, Plan]] = {
    "8 -> 5": (
        make_plan(2, 2, 2, UNEVEN, [(2, 2), (2, 2)], zero=1),
        make_plan(1, 5, 1, WHOLE, [(2, 1), (2, 1), (2, 1), (1, 1), (1, 1)], zero=1),
    ),
    "8 -> 5, whole": (
        make_plan(4, 2, 1, QUARTERS, [(2, 2), (2, 2)]),
        make_plan(1, 5, 1, WHOLE, [(2, 1), (2, 1), (2, 1), (1, 1), (1, 1)]),
    ),
}
NO_ROOM, NO_ROOM_AS = "no room", "dp2 uneven"
"""A run of which one rank gets no shared memory, and the case that it is otherwise equal to."""
SNAPSHOTS = ("snapshots", "private")
"""Runs with snapshots, of segments and of the workers' own memory."""
MEMORY: dict[tuple[str, str, int], int] = {}
"""Case, generation and rank -> the memory, which all processes of the launch have."""


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A snapshot of this rank's part of parameters and moments."""
    parts = collect(trainer.pipeline.parameters(), trainer.optimizer).items()
    return {name: (t.to_local() if hasattr(t, "to_local") else t).clone() for name, t in parts}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def steps(trainer: Trainer, last: int) -> None:
    add_dropout(trainer)
    train(trainer, StoppingOrders(last))  # type: ignore[arg-type]


def figures(place: Path) -> list[tuple[float | None, ...]]:
    """What the rows of a run say of its steps."""
    rows = last_row_of_each_step(read_metrics(place / "metrics.jsonl"))
    return [(row.step, row.loss, row.valid_loss, row.lr, row.grad_norm, row.loss_scale, row.skipped) for row in rows]


def lose_last_row(place: Path) -> None:
    """As if the worker had been killed before it wrote the row."""
    lines = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    (place / "metrics.jsonl").write_text("".join(lines[:-1]))


def keep_late(trainer: Trainer, other: int) -> list[int]:
    """Keep the gradients of a step late. Return a list that gets the step if `other`, the segment of another rank, then
    has its norm."""
    assert trainer.live is not None
    early: list[int] = []
    keep = trainer.live.keep_gradients

    def late(step: int, *args: Any) -> None:
        deadline = time.monotonic() + 0.3
        while step == HALFWAY and time.monotonic() < deadline and not early:
            time.sleep(0.01)
            if read_state(other).norm_step == step:
                early.append(step)
        keep(step, *args)

    trainer.live.keep_gradients = late  # type: ignore[method-assign]
    return early


def without_room_on_one_rank(folder: Path, rank: int, meeting: dist.Store) -> dict[str, Any]:
    """One rank gets no shared memory."""
    fill = LiveState.fill

    def full(*_: object) -> LiveState:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    if rank == 1:
        LiveState.fill = full  # type: ignore[method-assign, assignment]
    descriptor = MEMORY[NO_ROOM, "old", rank]
    trainer = open_trainer(folder / NO_ROOM, SAME[NO_ROOM_AS][0], 0, None, rank, meeting, MemoryOrder(live=descriptor))
    LiveState.fill = fill  # type: ignore[method-assign]
    steps(trainer, END)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (trainer.live is None, held_state(descriptor)))
    leave()
    rows = figures(folder / NO_ROOM) == figures(folder / f"{NO_ROOM_AS}, straight")
    return {"rows": rows, "kept": everyone}


def on_the_same_plan(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Straight without such memory; with it, and half way a new generation that continues on the old segments."""
    meeting = dist.FileStore(str(folder / "meeting"), world)
    found: dict[str, Any] = {}
    for name, (plan, _) in SAME.items():
        straight, place = folder / f"{name}, straight", folder / f"{name}, memory"
        trainer = open_trainer(straight, plan, 0, None, rank, meeting)
        overflow(trainer)
        steps(trainer, END)
        expected = state_of(trainer)
        leave()
        order = MemoryOrder(live=MEMORY[name, "old", rank])
        torch.manual_seed(1000)
        trainer = open_trainer(place, plan, 0, None, rank, meeting, order)
        overflow(trainer)
        assert trainer.live is not None
        early = keep_late(trainer, MEMORY[name, "old", 1]) if rank == 0 else []
        steps(trainer, HALFWAY)
        leave()
        if rank == 0:
            lose_last_row(place)
        order = MemoryOrder(
            live=MEMORY[name, "old", rank], source=source_of(plan, "plan-0.json", range(plan.world_size))
        )
        trainer = open_trainer(place, plan, 1, None, rank, meeting, order)
        steps(trainer, END)
        bits = same_bits(expected, state_of(trainer))
        leave()
        found[name] = {"unequal": bits, "compared": len(expected), "rows": figures(straight) == figures(place)}
        found[name]["skipped"] = trainer.scaler.state.skipped if trainer.scaler is not None else None
        found[name]["dropped"] = trainer.residuals_dropped
        found[name]["early"] = early
    found[NO_ROOM] = without_room_on_one_rank(folder, rank, meeting)
    return found


def overflow(trainer: Trainer) -> None:
    if trainer.scaler is not None:
        trainer.scaler.state = LossScale(value=TOO_LARGE)


def source_of(plan: Plan, path: str, in_place: bool = False) -> MemorySource:
    holders = [StateHolder(rank=rank, node=device.node) for rank, device in enumerate(plan.ranks)]
    continued = list(range(plan.world_size)) if in_place else []
    return MemorySource(generation=0, plan=path, step=HALFWAY, continued=continued, holders=holders)


def on_another_plan(cases: dict[str, tuple[Plan, Plan]], folder: Path, rank: int, world: int) -> dict[str, Any]:
    """The state of the new plan from the old one's segments, and from its checkpoint."""
    meeting = dist.FileStore(str(folder / "meeting"), world)
    found: dict[str, Any] = {}
    for name, (old, new) in cases.items():
        place = folder / name
        if rank < old.world_size:
            trainer = open_trainer(place, old, 0, None, rank, meeting, MemoryOrder(live=MEMORY[name, "old", rank]))
            steps(trainer, HALFWAY)
            leave()
        if rank >= new.world_size:
            continue
        trainer = open_trainer(place, new, 1, f"checkpoints/step-{HALFWAY:08}", rank, meeting)
        expected = state_of(trainer)
        dist.barrier()
        leave()
        # Old ranks without a process of the same number: their memory is on the nodes of others.
        mine = [MEMORY[name, "old", r] for r in range(old.world_size) if r % new.world_size == rank]
        source = source_of(old, "plan-0.json")
        order = MemoryOrder(live=MEMORY[name, "new", rank], source=source, segments=tuple(mine))
        trainer = open_trainer(place, new, 2, None, rank, meeting, order)
        bits = [same_bits(expected, state_of(trainer))]
        everyone: list[Any] = [None] * new.world_size
        held = held_state(MEMORY[name, "new", rank])
        dist.all_gather_object(everyone, (bits, trainer.step, held is not None and held.step, len(expected)))
        train(trainer, StoppingOrders(HALFWAY + 1))  # type: ignore[arg-type]
        leave()
        saved = Manifest.read(place / f"checkpoints/step-{HALFWAY:08}/manifest.json").generation
        os.ftruncate(MEMORY[name, "new", rank], 0)
        order = order.model_copy(update={"source": source_of(old, "plan-gone.json")})
        refused = ""
        try:
            open_trainer(place, new, 3, None, rank, meeting, order)
        except MemoryUnusableError as error:
            refused = str(error)
        leave()
        found[name] = {
            "refused": refused,
            "held": [held_state(descriptor) is not None for descriptor in mine],
            "unequal": [other for bits, *_ in everyone for names in bits for other in names],
            "steps": sorted({step for _, *steps, _ in everyone for step in steps}),
            "saved by": saved,
            "compared": sum(count for *_, count in everyone),
        }
    return found


def others(folder: Path, rank: int, world: int) -> dict[str, Any]:
    return on_another_plan(OTHER, folder, rank, world)


def fewer(folder: Path, rank: int, world: int) -> dict[str, Any]:
    return on_another_plan(FEWER, folder, rank, world)


def from_snapshots(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Snapshots of states in segments, and of states in the workers' own memory."""
    meeting = dist.FileStore(str(folder / "meeting"), world)
    return {name: _from_snapshots(folder / name, rank, meeting, name == "snapshots") for name in SNAPSHOTS}


def _from_snapshots(place: Path, rank: int, meeting: dist.Store, segment: bool) -> dict[str, Any]:
    """A run with sharded moments of which the second node is lost. The first one has snapshots of both parts."""
    old, name = sharded(1), place.name
    pairs = {
        owner: (MEMORY[f"{name} of {owner}", "old", rank], MEMORY[f"{name} of {owner}", "new", rank])
        for owner in (0, 1)
    }
    memory = tuple(SnapshotMemory(rank=owner, descriptors=pair) for owner, pair in pairs.items())
    order = MemoryOrder(live=MEMORY[name, "old", rank] if segment else None, snapshots=memory)
    trainer = open_trainer(place, old, 0, None, rank, meeting, order)
    assert trainer.ring is not None
    steps(trainer, HALFWAY)
    leave()
    if rank == 1:
        return {}
    held = {fd: held_state(fd, "guest") for pair in pairs.values() for fd in pair}
    by_step: dict[int, list[int]] = {}
    for descriptor, state in held.items():
        by_step.setdefault(state.step if state is not None else -1, []).append(descriptor)
    step = max(step for step, both in by_step.items() if len(both) == 2)
    one = make_plan(1, 1, 1, WHOLE, [(4, 2)])
    trainer = open_trainer(place, one, 1, f"checkpoints/step-{step:08}", 0, meeting)
    expected = state_of(trainer)
    leave()
    source = source_of(old, "plan-0.json").model_copy(update={"step": step})
    live = MEMORY[name, "new", 0] if segment else None
    order = MemoryOrder(live=live, source=source, segments=tuple(by_step[step]))
    trainer = open_trainer(place, one, 2, None, 0, meeting, order)
    found = {"step": step, "unequal": same_bits(expected, state_of(trainer)), "snapshots": sorted(by_step)}
    tensors = collect(trainer.pipeline.parameters(), trainer.optimizer)
    try:
        load_from_segments(tensors, [MappedSegment(by_step[step][0])], dist.distributed_c10d._get_default_group())
    except CheckpointError as error:
        found["half"] = str(error)
    leave()
    damaged = read_header(by_step[step][1])
    os.pwrite(by_step[step][1], b"damage", damaged.region("exp_avg") + 100)
    os.ftruncate(MEMORY[name, "new", 0], 0)
    try:
        open_trainer(place, one, 3, None, 0, meeting, order)
    except MemoryUnusableError as error:
        found["damaged"] = str(error)
    leave()
    found["afterwards"] = [held_state(fd, "guest") is None for fd in by_step[step]]
    return found


def main(what: str, world: int, folder: Path) -> None:
    data = folder / "data"
    prepare([TEXT], data, PrepareOptions(valid_fraction=0.1, limit_bytes=200_000))
    names: dict[str, dict[str, Any]]
    if what == "same":
        names = {f"{name}, {part}": changes for name, (_, changes) in SAME.items() for part in ("straight", "memory")}
        names[NO_ROOM] = {}
        cases = [*SAME, NO_ROOM]
    elif what == "snapshots":
        cases = [case for name in SNAPSHOTS for case in (name, f"{name} of 0", f"{name} of 1")]
        changes = {"recovery": {"snapshot_every": 1}, "checkpoint": {"every": 1, "keep": 9}}
        names = dict.fromkeys(SNAPSHOTS, changes)
    else:
        cases = list(OTHER if what == "other" else FEWER)
        names = {name: {"validation": {"every": 100}} for name in cases}
    for name, changes in names.items():
        make_folder(folder / name, data, **changes)
    for name in cases:
        for which in ("old", "new"):
            for rank in range(world):
                MEMORY[name, which, rank] = os.memfd_create("state")
    bodies = {"same": on_the_same_plan, "other": others, "fewer": fewer, "snapshots": from_snapshots}
    launch(bodies[what], world, str(folder))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
