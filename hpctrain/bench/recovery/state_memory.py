"""How much longer a training step takes whose state lies in memory that outlives the process, and with snapshots of
this state: rows of `hpctrain bench checkpoint`."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.bench.comparison import TimeSample
from hpctrain.bench.ranks import leave_process_group, timed
from hpctrain.checkpoint.memory.live_state import LiveState, SegmentOwner
from hpctrain.checkpoint.memory.snapshots import LiveSource, SnapshotRing
from hpctrain.checkpoint.save import local_part
from hpctrain.checkpoint.state import MOMENTS, set_optimizer_step
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.build import Trainer
from hpctrain.worker.loop import Loop
from hpctrain.worker.standalone import open_loop

STEPS = 5
"""Steps of a sample, of which the median counts."""
WITH_SNAPSHOTS = 12
"""Steps of a sample with snapshots, at least, of which the mean counts: not each of them has a snapshot."""
MOST_STEPS = 48
"""Steps of such a sample, at most, also if the interval between two snapshots is longer."""


def step_pairs(
    rank: int, world: int, folder: Path, plan: Plan, rounds: int
) -> list[tuple[TimeSample, TimeSample]]:  # fmt: skip
    """Return the times of a step, one pair a round: (with the state in memory that outlives the process, without it).
    The first round times the step without it first, the second with it first, and so on."""
    trainer, loop = open_loop(rank, world, folder, plan)
    loop.one_step()
    pairs = []
    for number in range(rounds):
        samples: dict[bool, TimeSample] = {}
        for outlives in (True, False) if number % 2 else (False, True):
            _move(trainer, outlives)
            loop.one_step()
            samples[outlives] = _median_step(loop)
        pairs.append((samples[True], samples[False]))
    leave_process_group()
    return pairs


def snapshot_pairs(
    rank: int, world: int, folder: Path, plan: Plan, rounds: int
) -> dict[str, list[tuple[TimeSample, TimeSample]]]:
    """Return case -> the times of a step (with snapshots, without), one pair a round, for a snapshot in each step and
    for `recovery.snapshot_every: auto`. The state lies in memory that outlives the process in both. Each of the two
    ranks has the snapshots of the other, too.

    Raises:
        ValueError: there are not two ranks.
    """
    if world != 2:
        raise ValueError(f"{world} ranks, not 2")
    trainer, loop = open_loop(rank, world, folder, plan)
    _move(trainer, outlives=True)
    assert trainer.live is not None, "the state was moved"
    memory = {owner: (os.memfd_create("bench"), os.memfd_create("bench")) for owner in range(world)}
    own, group = memory.pop(rank), dist.new_group(backend="gloo")
    cases: dict[int | None, list[tuple[TimeSample, TimeSample]]] = {1: [], None: []}
    intervals = []
    for number in range(rounds):
        for every, pairs in cases.items():
            samples, steps = {}, WITH_SNAPSHOTS
            for with_ring in (False, True) if number % 2 else (True, False):
                if with_ring:
                    trainer.ring = SnapshotRing(LiveSource(trainer.live.segment, world), own, memory, every, group)
                for _ in range(STEPS):  # until the interval is chosen
                    loop.one_step()
                if trainer.ring is not None:
                    # A ring's first snapshot in each of its two memories takes longer, because it maps their pages.
                    for _ in range(_interval(trainer.ring)):
                        loop.one_step()
                    interval = _interval(trainer.ring)
                    steps = min(-(-WITH_SNAPSHOTS // interval) * interval, MOST_STEPS)
                    intervals += [interval] * (every is None)
                samples[with_ring] = timed(loop.one_step, steps)
                if trainer.ring is not None:
                    trainer.ring.close()
                    trainer.ring = None
            pairs.append((samples[True], samples[False]))
    leave_process_group()
    auto = f"step with snapshots, auto: every {statistics.median_low(intervals)}"
    return {"step with a snapshot": cases[1], auto: cases[None]}


def _interval(ring: SnapshotRing) -> int:
    """Return how many steps lie between two snapshots, as all ranks agree."""
    interval = torch.tensor(ring.interval())
    dist.all_reduce(interval, dist.ReduceOp.MAX)
    return int(interval)


@torch.no_grad()
def _move(trainer: Trainer, outlives: bool) -> None:
    """Move parameters and moments into a new segment, or into memory of this process."""
    named, optimizer = trainer.pipeline.parameters(), trainer.optimizer
    if outlives:
        owner = SegmentOwner(0, trainer.coordinate.rank, trainer.plan.sha256())
        descriptor = os.memfd_create("bench")
        trainer.live = LiveState.fill(descriptor, owner, named, optimizer, trainer.run.optimizer.clip_norm, {})
        trainer.live.commit(trainer.step, None, trainer.reducer.state())
        return
    trainer.live = None
    tensors: list[Tensor] = [parameter for _, parameter in named]
    tensors += [optimizer.state[parameter][moment] for _, parameter in named for moment in MOMENTS]
    for tensor in map(local_part, tensors):
        tensor.data = tensor.data.clone()
    set_optimizer_step(named, optimizer, trainer.step)


def _median_step(loop: Loop) -> TimeSample:
    samples = []
    for _ in range(STEPS):
        start, cpu_start = time.perf_counter(), time.process_time()
        loop.one_step()
        samples.append(TimeSample(time.perf_counter() - start, time.process_time() - cpu_start))
    return TimeSample(
        statistics.median(sample.wall_s for sample in samples), statistics.median(sample.cpu_s for sample in samples)
    )
