"""One process of `hpctrain bench compression`: `python -m hpctrain.bench.compression.rank FOLDER RANK`.

All methods keep their model in the process and take turns by blocks of steps, so that other load on the machine
affects all of them alike.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.bench.compression.bench_trainer import BenchTrainer
from hpctrain.bench.compression.launch_files import LaunchResult, LaunchSettings, LaunchSpec, Samples
from hpctrain.bench.compression.methods import METHODS, MethodContext
from hpctrain.bench.compression.pipelines import PIPELINES, PipelineBenchTrainer, open_pipeline
from hpctrain.bench.compression.planned_codec import StepWorkload
from hpctrain.bench.compression.traffic import Counter, header_factor
from hpctrain.corpus.read.tokens import Corpus
from hpctrain.model.build import build_stage
from hpctrain.records.plan.codec import CodecSpec

CORPUS_FOLDER = "corpus"
VALIDATION_ROWS = 16


class MethodRunner:
    """The methods of a launch, open in this process."""

    def __init__(self, scene: LaunchSpec, folder: Path, rank: int) -> None:
        self._scene, self._settings = scene, scene.settings
        self._rank = rank
        self._parent = os.getppid()
        self._train = Corpus.open([folder / CORPUS_FOLDER], "train", self._settings.seq_len)
        self._valid = Corpus.open([folder / CORPUS_FOLDER], "valid", self._settings.seq_len)
        self.trainees = {name: _open(name, self._settings, rank, scene.nodes) for name in scene.methods}
        self._counter = Counter(scene.interface, scene.nodes)
        self._steps = dict.fromkeys(scene.methods, 0)
        self._found: dict[str, list[dict[str, float | None]]] = {name: [] for name in scene.methods}

    def measure(self) -> None:
        """Make the warm-up steps, then the measured ones; the methods take turns by blocks of steps."""
        settings = self._settings
        for name in self._scene.methods:
            self._block(name, settings.warm_steps, keep=False)
        left = settings.steps
        number = 0
        while left > 0:
            count = min(left, settings.block_steps)
            # Each round begins with another method, so that no method always follows the same one.
            first = number % len(self._scene.methods)
            for name in (*self._scene.methods[first:], *self._scene.methods[:first]):
                self._block(name, count, keep=True)
            left -= count
            number += 1

    def outcome(self) -> LaunchResult:
        """The measurements of all processes, the same on each. Collective."""
        factor = header_factor(self._counter)
        everyone: list[Any] = [None] * self._scene.nodes
        dist.all_gather_object(everyone, (self._found, factor))
        parameters = self._settings.spec.parameters()
        samples = {name: self._samples(name, [found for found, _ in everyone]) for name in self._scene.methods}
        return LaunchResult(parameters, sum(own for _, own in everyone) / len(everyone), samples)

    def _block(self, name: str, count: int, keep: bool) -> None:
        for _ in range(count):
            rows = self._rows(self._steps[name], every=name in PIPELINES)
            self._steps[name] += 1
            found = self._timed(self.trainees[name], rows)
            if keep:
                self._found[name].append(found)

    def _timed(self, trainee: BenchTrainer | PipelineBenchTrainer, rows: torch.Tensor) -> dict[str, float | None]:
        if os.getppid() != self._parent:
            sys.exit("the bench is gone")
        dist.barrier()
        sent = self._counter.read()
        start, cpu_start = time.perf_counter(), time.process_time()
        told = trainee.step(rows)
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        dist.barrier()  # by now the others have received what this one sent
        return {"wall": wall_s, "cpu": cpu_s, "bytes": self._counter.read() - sent, "counted": told.sent_bytes}

    def _rows(self, step: int, every: bool) -> torch.Tensor:
        """This process's sequences of a step, or those of all processes."""
        count, nodes = self._settings.rows, self._scene.nodes
        start = (step * nodes + (0 if every else self._rank)) * count
        count *= nodes if every else 1
        return torch.from_numpy(self._train.rows(self._settings.seed, start, count))

    def _samples(self, name: str, ranks: list[dict[str, list[dict[str, float | None]]]]) -> Samples:
        steps = list(zip(*(found[name] for found in ranks), strict=True))
        rows = torch.from_numpy(self._valid.rows(self._settings.seed, 0, min(VALIDATION_ROWS, self._valid.windows)))
        loss = self.trainees[name].validate(rows)
        counted = [one["counted"] for step in steps for one in step]
        planned = self.trainees[name].planned
        return Samples(
            wall_s=[max(_number(one["wall"]) for one in step) for step in steps],
            cpu_s=[_mean([one["cpu"] for one in step]) for step in steps],
            interface_bytes=[_mean([one["bytes"] for one in step]) for step in steps],
            counted_bytes=None if None in counted else _mean(counted),
            loss=loss if math.isfinite(loss) else None,
            choice=None if planned is None else planned.codec.mode,
            planned_step_s=None if planned is None else _planned_step_s(planned),
        )


def _open(name: str, settings: LaunchSettings, rank: int, world: int) -> BenchTrainer | PipelineBenchTrainer:
    if name in PIPELINES:
        return open_pipeline(PIPELINES[name], settings, rank, world)
    model = build_stage(settings.spec, 0, settings.spec.layers, settings.seed)
    group = dist.new_group(list(range(world)))
    work = StepWorkload(settings.spec, settings.rows, settings.seq_len)
    exchange = METHODS[name](model, MethodContext(group, settings.dense_steps, work))
    return BenchTrainer(exchange, functools.partial(torch.optim.SGD, lr=settings.lr), world, clip_norm=1.0)


def _planned_step_s(planned: CodecSpec) -> dict[str, float]:
    return {each.codec.mode: each.step_s for each in planned.compared if each.step_s is not None}


def _number(value: float | None) -> float:
    assert value is not None
    return value


def _mean(values: list[float | None]) -> float:
    return sum(_number(value) for value in values) / len(values)


def main(folder: Path, rank: int) -> None:
    """Join the process group and measure; rank 0 writes the samples."""
    scene = LaunchSpec.read(folder)
    # Before torch opens a connection: otherwise gloo resolves the host's name.
    os.environ["GLOO_SOCKET_IFNAME"] = scene.interface
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), scene.nodes), rank=rank,
                            world_size=scene.nodes)  # fmt: skip
    contest = MethodRunner(scene, folder, rank)
    contest.measure()
    outcome = contest.outcome()
    if rank == 0:
        outcome.write(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
