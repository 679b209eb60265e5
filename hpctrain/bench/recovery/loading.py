"""How long ranks take to load a checkpoint whose files they hash together, a row of `hpctrain bench checkpoint`."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import StorageError
from hpctrain.bench.comparison import TimeSample
from hpctrain.bench.ranks import leave_process_group, timed
from hpctrain.checkpoint import published
from hpctrain.checkpoint.load import CheckpointReader
from hpctrain.checkpoint.state import collect
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.build import manifest_of
from hpctrain.worker.standalone import open_loop


def load_pairs(
    rank: int, world: int, folder: Path, plan: Plan, rounds: int
) -> list[tuple[TimeSample, TimeSample]]:  # fmt: skip
    """Save a checkpoint, and return the times of loading it (each rank hashes its part of the files, rank 0 hashes all
    files before any rank loads), one pair a round. The first round times rank 0 first, the second all ranks first, and
    so on.

    Raises:
        StorageError: the checkpoint cannot be written.
    """
    trainer, loop = open_loop(rank, world, folder, plan)
    loop.one_step()
    tensors = collect(trainer.pipeline.parameters(), trainer.optimizer)
    trainer.saver.save(tensors, manifest_of(trainer))
    saved = trainer.saver.finished(wait=True)
    if saved is not None and saved.error is not None:
        raise StorageError(saved.error)
    path, group = published.listed(folder / "checkpoints")[-1], dist.new_group(backend="gloo")
    pairs = []
    for number in range(rounds):
        samples: dict[bool, TimeSample] = {}
        for together in (True, False) if number % 2 else (False, True):
            load = _load if together else _load_hashed_by_one
            samples[together] = timed(lambda load=load: load(path, tensors, group), 1)  # type: ignore[misc]
        pairs.append((samples[True], samples[False]))
    leave_process_group()
    return pairs


def _load(path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    CheckpointReader(path).load(tensors, group)


def _load_hashed_by_one(path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    if dist.get_rank() == 0:
        published.verify(path)
    dist.barrier()
    CheckpointReader(path, hashed=True).load(tensors, group)
