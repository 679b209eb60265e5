"""`hpctrain bench checkpoint`: how long a save stalls the training, compared with other ways to save the same state,
and how long loading takes.

Each round saves the state of a real trainer in four ways, in an order that rotates: hpctrain's save in the background,
hpctrain's save when the training waits for the writer, torch's `dcp.save` and torch's `dcp.async_save`. A stall is the
time until the training may go on. At its end, each round times training steps while hpctrain's writer works, and three
training steps without a writer. Four processes then load a checkpoint whose hashes they check together. A last process
times steps whose state lies in memory that outlives the process, and two ranks with sharded moments time steps with
snapshots of this state.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hpctrain.bench.comparison import ComparisonRow, TimeSample, compare
from hpctrain.bench.ranks import leave_process_group, run_ranks
from hpctrain.bench.record import make_record
from hpctrain.bench.recovery.loading import load_pairs
from hpctrain.bench.recovery.state_memory import snapshot_pairs, step_pairs
from hpctrain.checkpoint.state import collect
from hpctrain.launch import small_run
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.build import Trainer, manifest_of
from hpctrain.worker.loop import Loop
from hpctrain.worker.standalone import open_loop

OURS, SYNCHRONOUS, TORCH_SAVE, TORCH_ASYNC = "ours", "ours, waited for", "torch dcp.save", "torch dcp.async_save"
SPEC = DecoderSpec(layers=10, dim=384, heads=6, vocab=small_run.BYTES_VOCABULARY)


@dataclass(frozen=True)
class SaveSettings:
    """Settings of `hpctrain bench checkpoint`: number of rounds, batch, and the model. Weights and moments of the
    default model are 220 MB."""

    rounds: int = 10
    """Number of rounds. In each round, the state is saved once in each way, and steps are timed with and without a
    writer."""
    rows: int = 2
    """Sequences of a batch, where the bench measures saves."""
    seq_len: int = 64
    """Tokens of a sequence, where the bench measures saves."""
    spec: DecoderSpec = SPEC
    memory_rows: int = 4
    """Sequences of a batch, where the bench times steps with and without state in memory that outlives the
    process."""
    snapshot_rounds: int = 4
    """Number of rounds in which steps with and without snapshots are timed. Such a round takes longer than others."""
    memory_seq_len: int = 256
    """Tokens of a sequence, where the bench times steps with and without state in memory. The copies of a step into
    that memory take the same time for any number of tokens."""
    loading_ranks: int = 4
    """Ranks that save a checkpoint with ZeRO 3, and load it."""


def measure(settings: SaveSettings, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure four ways of saving (hpctrain's in the background and waited for, torch's `dcp.save` and
    `dcp.async_save`) in one training process, loading in several, and steps with state in memory and with snapshots;
    return the record of the bench.

    Args:
        progress: called with the name of the measurement before it begins.

    Raises:
        HpctrainError: the process failed, or a save did.
    """
    progress("stalls and steps")
    plan = small_run.make_plan(1, 1, settings.spec.layers, settings.rows, 1)
    with small_run.temporary_corpus() as folder:
        small_run.make_run(folder / "run", folder / "corpus", settings.spec, settings.rows, settings.seq_len)
        rows, facts = run_ranks(_saves, 1, folder / "run", plan, settings)
        progress("loading")
        shared = small_run.make_plan(1, settings.loading_ranks, settings.spec.layers, 1, 1, zero=3)
        small_run.make_run(folder / "load", folder / "corpus", settings.spec, settings.loading_ranks, settings.seq_len)
        loads = run_ranks(load_pairs, settings.loading_ranks, folder / "load", shared, settings.rounds)
        case = f"load, {settings.loading_ranks} ranks hash their parts"
        rows.append(compare(case, "rank 0 hashes all", loads))
        for name in ("memory", "snapshots"):
            small_run.make_run(
                folder / name, folder / "corpus", settings.spec, settings.memory_rows, settings.memory_seq_len
            )
        progress("steps with state in memory")
        longer = small_run.make_plan(1, 1, settings.spec.layers, settings.memory_rows, 1)
        pairs = run_ranks(step_pairs, 1, folder / "memory", longer, settings.rounds)
        rows.append(compare("step with state in memory", "a step without", pairs))
        progress("steps with snapshots")
        halves = small_run.make_plan(1, 2, settings.spec.layers, settings.memory_rows // 2, 1, zero=1)
        cases = run_ranks(snapshot_pairs, 2, folder / "snapshots", halves, settings.snapshot_rounds)
        rows += [compare(case, "a step without", pairs) for case, pairs in cases.items()]
    described = asdict(settings) | {"spec": settings.spec.model_dump(exclude_none=True)} | facts
    return make_record("checkpoint", rows, described)


def _saves(
    rank: int, world: int, folder: Path, plan: Plan, settings: SaveSettings
) -> tuple[list[ComparisonRow], dict[str, Any]]:
    trainer, loop = open_loop(rank, world, folder, plan)
    methods = SaveMethods(trainer, folder)
    loop.one_step()
    first = methods.stall(OURS)
    stalls: list[dict[str, TimeSample]] = []
    steps: list[tuple[TimeSample, TimeSample]] = []
    names = [OURS, SYNCHRONOUS, TORCH_SAVE, TORCH_ASYNC]
    for number in range(settings.rounds):
        names = names[1:] + names[:1]
        stalls.append({name: methods.stall(name) for name in names})
        steps.append(_steps_beside_writer(loop, methods, first=number % 2 == 0))
    leave_process_group()
    rows = [
        compare(f"stall, {other}", other, [(times[OURS], times[other]) for times in stalls])
        for other in (SYNCHRONOUS, TORCH_SAVE, TORCH_ASYNC)
    ]
    rows.append(compare("step while writing", "a step with no writer", steps))
    return rows, {"state_bytes": methods.state_bytes(), "first_stall_s": first.wall_s}


class SaveMethods:
    """The ways to save the state of a trainer that the bench compares. torch's (`dcp.save` and `dcp.async_save`) write
    into a folder that is emptied before each save. hpctrain's (with and without waiting for the writer) write a
    checkpoint of the run.
    """

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer = trainer
        self._folder = folder
        self._group = dist.new_group(backend="gloo")

    def stall(self, method: str) -> TimeSample:
        """Return the time that the training waits for a save with `method`. A writer in the background has ended when
        this function returns."""
        tensors = self._tensors()
        target = self._folder / "torch"
        shutil.rmtree(target, ignore_errors=True)
        start, cpu_start = time.perf_counter(), time.process_time()
        wait = self._start(method, tensors, target)
        taken = TimeSample(time.perf_counter() - start, time.process_time() - cpu_start)
        wait()
        return taken

    def save(self) -> None:
        """Start hpctrain's save of the present state, which continues in the background."""
        self._trainer.saver.save(self._tensors(), manifest_of(self._trainer))

    def writing(self) -> bool:
        """Return whether hpctrain's writer is still working."""
        return self._trainer.saver.busy()

    def state_bytes(self) -> int:
        """Return the bytes of the state that is saved."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())

    def finish(self) -> None:
        """Wait until hpctrain's save is done, and check that it succeeded."""
        saved = self._trainer.saver.finished(wait=True)
        assert saved is None or saved.error is None, saved

    def _start(self, method: str, tensors: dict[str, Tensor], target: Path) -> Callable[[], object]:
        """Save with `method` as far as the training has to wait for it; return a function that waits for the rest.

        Args:
            tensors: the state, by name.
            target: folder for torch's ways to save.
        """
        if method == TORCH_SAVE:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(target), process_group=self._group)
            return lambda: None
        if method == TORCH_ASYNC:
            writer = dcp.FileSystemWriter(target)
            saving = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
            assert isinstance(saving, Future), "torch answers otherwise only when asked for its own stager"
            return saving.result
        self._trainer.saver.save(tensors, manifest_of(self._trainer))
        if method == SYNCHRONOUS:
            self.finish()
        return self.finish

    def _tensors(self) -> dict[str, Tensor]:
        return collect(self._trainer.pipeline.parameters(), self._trainer.optimizer)


def _steps_beside_writer(loop: Loop, methods: SaveMethods, first: bool) -> tuple[TimeSample, TimeSample]:
    """Return the median times of a step (while hpctrain's writer works, without a writer). `first` says whether the
    steps beside the writer are measured first."""
    if first:
        beside = _while_writing(loop, methods)
        return beside, _median([_step(loop) for _ in range(3)])
    alone = _median([_step(loop) for _ in range(3)])
    return _while_writing(loop, methods), alone


def _while_writing(loop: Loop, methods: SaveMethods) -> TimeSample:
    methods.save()
    samples = [_step(loop)]
    while methods.writing():
        samples.append(_step(loop))
    methods.finish()
    # The writer worked only during a part of the last step, so it counts only if it is the only one.
    return _median(samples[:-1] or samples)


def _step(loop: Loop) -> TimeSample:
    start, cpu_start = time.perf_counter(), time.process_time()
    loop.one_step()
    return TimeSample(time.perf_counter() - start, time.process_time() - cpu_start)


def _median(samples: list[TimeSample]) -> TimeSample:
    return TimeSample(
        statistics.median(sample.wall_s for sample in samples), statistics.median(sample.cpu_s for sample in samples)
    )
