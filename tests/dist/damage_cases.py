"""Checkpoints of four ranks that share the weights: one of which a file cannot be read when it is saved, and damaged
ones, loaded on one, three and four ranks. Called by the test beside it.

python damage_cases.py save 4 FOLDER
python damage_cases.py load WORLD FOLDER
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import FOUR, SPEC, WHOLE, deviation, make_plan, open_pipeline, save_state
from processes import largest, launch, process_group

from hpctrain.base.errors import DamagedCheckpointError
from hpctrain.checkpoint import published
from hpctrain.checkpoint.load import CheckpointReader
from hpctrain.checkpoint.save import CheckpointSaver
from hpctrain.checkpoint.state import collect, prepare_moments
from hpctrain.records.history.generation import GENERATIONS, Fence
from hpctrain.records.history.manifest import Manifest

PLANS = {
    1: make_plan(1, 1, 1, WHOLE, [(2, 4)]),
    3: make_plan(1, 3, 1, WHOLE, [(2, 1), (3, 1), (3, 1)], zero=3),
    4: make_plan(1, 4, 1, WHOLE, FOUR, zero=3),
}
"""World size -> plan; with several ranks, each holds a part of every parameter."""


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def link(path: Path) -> None:
    shutil.move(path, path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "flipped": ("__2_0.distcp", flip),
    "truncated": ("__3_0.distcp", truncate),
    "linked": ("__0_0.distcp", link),
    "list": (".metadata", flip),
}
"""Name -> file and what is done to it."""


def save(folder: Path, rank: int, world: int) -> dict[str, Any]:
    with process_group(folder, rank, world):
        save_state(folder / "saved", PLANS[world], SPEC, rank)
        describe = published.describe_file
        if rank == 2:
            published.describe_file = lambda path: (path.unlink(), describe(path))[1]  # it is gone when it is hashed
        lost = folder / "lost"
        saver = CheckpointSaver(lost, dist.new_group(backend="gloo"), keep=2, fence=Fence(lost / GENERATIONS, 0))
        manifest = Manifest(
            step=1, generation=0, samples=0, seed=0, run_sha256="", model_sha256="", world_size=world, files=[]
        )
        saver.save({f"part {rank}": torch.ones(64)}, manifest)
        result = saver.finished(wait=True)
        saver.close()
        published.describe_file = describe
        assert result is not None
        errors = gathered(result.error, world)
    return {"lost": {"errors": errors, "files": sorted(path.name for path in lost.iterdir())}}


def load(folder: Path, rank: int, world: int) -> dict[str, Any]:
    saved = next((folder / "saved").glob("step-*"))
    expected = torch.load(folder / "saved" / "expected.pt", weights_only=True)
    hashed: list[str] = []
    check = published.check_hash

    def counted(path: Path, entry: Any) -> None:
        hashed.append(entry.name)
        check(path, entry)

    published.check_hash = counted
    with process_group(folder, rank, world):
        pipeline, _, _ = open_pipeline(PLANS[world], SPEC, rank)
        named = pipeline.parameters()
        optimizer = torch.optim.AdamW([p for _, p in named], foreach=False)
        prepare_moments(named, optimizer)
        tensors = collect(named, optimizer)
        for tensor in tensors.values():
            tensor.fill_(9.0)
        reader = CheckpointReader(saved)
        reader.load(tensors, dist.group.WORLD)
        error = largest([deviation(tensor, expected[key]) for key, tensor in tensors.items()])
        shares = gathered(list(hashed), world)
        reader.load(tensors, dist.group.WORLD)
        again = gathered(list(hashed), world)
        found = {}
        for name, (file, damage) in DAMAGES.items():
            copy = folder / f"{world} {name}" / saved.name
            if rank == 0:
                shutil.copytree(saved, copy)
                damage(copy / file)
            dist.barrier()
            found[name] = gathered(refusal(copy, tensors), world)
    return {"good": {"error": error, "shares": shares, "again": again}, "damaged": found}


def refusal(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> str | None:
    """What is wrong with a checkpoint, as this rank is told; None if it loads."""
    try:
        CheckpointReader(checkpoint).load(tensors, dist.group.WORLD)
    except DamagedCheckpointError as error:
        return str(error)
    return None


def gathered(value: Any, world: int) -> list[Any]:
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, value)
    return everyone


if __name__ == "__main__":
    launch({"save": save, "load": load}[sys.argv[1]], int(sys.argv[2]), sys.argv[3])
