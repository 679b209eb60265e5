"""One process of `hpctrain bench compression`: `python -m hpctrain.bench.compression.rank FOLDER RANK`.

Each method keeps its model in the process for the whole launch. The methods take turns by blocks of steps, so that
other load on the machine affects all of them alike.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from hpctrain.bench.compression.bench_trainer import (
    HYBRIDS,
    PIPELINES,
    BenchTrainer,
    PipelineBenchTrainer,
    open_pipeline,
)
from hpctrain.bench.compression.launch import LaunchResult, LaunchSettings, LaunchSpec, Samples
from hpctrain.bench.compression.methods import METHODS, MethodContext
from hpctrain.bench.compression.planned_codec import StepWorkload
from hpctrain.corpus.read.tokens import Corpus
from hpctrain.model.build import build_stage

LOOPBACK = "lo"
CALIBRATION_NUMBERS = 2 * 2**20
"""Number of fp32 values in an all-reduce whose payload is known; with so many, the barriers around the all-reduce do
not matter."""
CORPUS_FOLDER = "corpus"
VALIDATION_ROWS = 16
"""Most sequences on which a method is validated after its last step."""


class Counter:
    """Counts the bytes that this process's node sends through a network interface. Processes that share one loopback
    each count an equal part of the loopback's bytes."""

    def __init__(self, interface: str, world: int) -> None:
        self._interface = interface
        self._sharers = world if interface == LOOPBACK else 1

    def read(self) -> float:
        """Return the bytes sent since the interface came up; on a loopback, these bytes divided by the number of
        processes that share it."""
        return psutil.net_io_counters(pernic=True, nowrap=False)[self._interface].bytes_sent / self._sharers

    def during(self, work: Callable[[], object]) -> float:
        """Run `work` between two barriers and return the bytes that the interface sent meanwhile, as `read`
        counts them. Collective."""
        dist.barrier()
        before = self.read()
        work()
        dist.barrier()
        return self.read() - before


def header_factor(counter: Counter, repeats: int = 3) -> float:
    """Return the bytes that the network interface sends for each byte of payload in a ring all-reduce, as the median of
    `repeats` measurements. Collective."""
    world = dist.get_world_size()
    numbers = torch.zeros(CALIBRATION_NUMBERS)
    payload = 2 * (world - 1) * numbers.numel() * numbers.element_size() / world
    factors = sorted(counter.during(lambda: dist.all_reduce(numbers)) / payload for _ in range(repeats))
    return factors[len(factors) // 2]


class StepSample(NamedTuple):
    """The measurements of one step of a method in this process: wall time, CPU time of this process, and the
    bytes sent, by the network interface's count and by the method's own count."""

    wall_s: float
    cpu_s: float
    interface_bytes: float
    """Bytes, headers included, that the node's network interface sent in the step; on a loopback, this process's equal
    part of them."""
    counted_bytes: int | None
    """Payload bytes that this rank sent, by the method's own count; None where the method does not count."""


class MethodRunner:
    """All methods of one launch of the benchmark, in one of the launch's processes; measures them in turns."""

    def __init__(self, scene: LaunchSpec, folder: Path, rank: int) -> None:
        self._scene, self._settings = scene, scene.settings
        self._rank = rank
        self._parent = os.getppid()
        self._train = Corpus.open([folder / CORPUS_FOLDER], "train", self._settings.seq_len)
        self._valid = Corpus.open([folder / CORPUS_FOLDER], "valid", self._settings.seq_len)
        self.trainees = {name: _open(name, self._settings, rank, scene) for name in scene.methods}
        self._counter = Counter(scene.interface, scene.world)
        self._steps = dict.fromkeys(scene.methods, 0)
        self._measured: dict[str, list[StepSample]] = {name: [] for name in scene.methods}

    def measure(self) -> None:
        """Make the warm-up steps of each method, then the measured steps; the methods take turns by blocks of steps.
        Collective."""
        settings = self._settings
        for name in self._scene.methods:
            self._block(name, settings.warm_steps, keep=False)
        for number, done in enumerate(range(0, settings.steps, settings.block_steps)):
            # Each round begins with another method, so that no method always follows the same one.
            first = number % len(self._scene.methods)
            for name in (*self._scene.methods[first:], *self._scene.methods[:first]):
                self._block(name, min(settings.steps - done, settings.block_steps), keep=True)

    def outcome(self) -> LaunchResult:
        """Return the measurements of all processes, which every process then has. Collective."""
        factor = header_factor(self._counter)
        everyone: list[Any] = [None] * self._scene.world
        dist.all_gather_object(everyone, (self._measured, factor))
        parameters = self._settings.spec.parameters()
        samples = {name: self._samples(name, [by_name[name] for by_name, _ in everyone]) for name in self.trainees}
        return LaunchResult(parameters, fmean(factor for _, factor in everyone), samples)

    def _block(self, name: str, count: int, keep: bool) -> None:
        for _ in range(count):
            rows = self._rows(self._steps[name], every=name in PIPELINES | HYBRIDS)
            self._steps[name] += 1
            sample = self._timed(self.trainees[name], rows)
            if keep:
                self._measured[name].append(sample)

    def _timed(self, trainee: BenchTrainer | PipelineBenchTrainer, rows: torch.Tensor) -> StepSample:
        if os.getppid() != self._parent:
            sys.exit("the bench is gone")
        dist.barrier()
        sent = self._counter.read()
        start, cpu_start = time.perf_counter(), time.process_time()
        sent_bytes = trainee.step(rows)
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        dist.barrier()  # by now the other ranks have received what this rank sent
        return StepSample(wall_s, cpu_s, self._counter.read() - sent, sent_bytes)

    def _rows(self, step: int, every: bool) -> torch.Tensor:
        """Return the tokens of a step, int64 [sequences, seq_len + 1]: the sequences of this process, or with `every`
        those of all processes."""
        count, world = self._settings.rows, self._scene.world
        start = (step * world + (0 if every else self._rank)) * count
        count *= world if every else 1
        return torch.from_numpy(self._train.rows(self._settings.seed, start, count))

    def _samples(self, name: str, ranks: list[list[StepSample]]) -> Samples:
        steps = list(zip(*ranks, strict=True))
        rows = torch.from_numpy(self._valid.rows(self._settings.seed, 0, min(VALIDATION_ROWS, self._valid.windows)))
        loss = self.trainees[name].validate(rows)
        counted = [sample.counted_bytes for step in steps for sample in step if sample.counted_bytes is not None]
        planned = self.trainees[name].planned
        return Samples(
            wall_s=[max(sample.wall_s for sample in step) for step in steps],
            cpu_s=[fmean(sample.cpu_s for sample in step) for step in steps],
            interface_bytes=[fmean(sample.interface_bytes for sample in step) for step in steps],
            counted_bytes=fmean(counted) if counted else None,
            loss=loss if math.isfinite(loss) else None,
            choice=None if planned is None else planned.codec.mode,
            choice_intra_node=None if planned is None or planned.intra_node == "flat" else planned.intra_node,
            planned_step_s=None
            if planned is None
            else {one.codec.label: one.step_s for one in planned.compression[-1].compared if one.step_s is not None},
        )


def _open(name: str, settings: LaunchSettings, rank: int, scene: LaunchSpec) -> BenchTrainer | PipelineBenchTrainer:
    world = scene.world
    if (method := (PIPELINES | HYBRIDS).get(name)) is not None:
        return open_pipeline(method, settings, rank, world)
    model = build_stage(settings.spec, 0, settings.spec.layers, settings.seed)
    group = dist.new_group(list(range(world)))
    work = StepWorkload(settings.spec, settings.rows, settings.seq_len)
    exchange = METHODS[name](model, MethodContext(group, settings.dense_steps, work, scene.devices))
    return BenchTrainer(exchange, functools.partial(torch.optim.SGD, lr=settings.lr), world, clip_norm=1.0)


def main(folder: Path, rank: int) -> None:
    """Join the process group, measure all methods, and on rank 0 write the result.

    Args:
        folder: folder of the launch, with the file that `LaunchSpec` reads, the corpus, and the file through which
            the processes meet.
    """
    scene = LaunchSpec.read(folder)
    # Set before torch opens a connection; without it, gloo resolves the host's name.
    os.environ["GLOO_SOCKET_IFNAME"] = scene.interface
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), scene.world), rank=rank,
                            world_size=scene.world)  # fmt: skip
    contest = MethodRunner(scene, folder, rank)
    contest.measure()
    outcome = contest.outcome()
    if rank == 0:
        outcome.write(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
