"""`hpctrain bench runtime`: cost of the training runtime compared with hand-written torch code for equal work.

one_process  a step of the worker's loop compared with a bare training loop
dp2          two replicas compared with torch's DistributedDataParallel, with equal batches per rank
pp2          two stages under 1F1B compared with the schedule's ideal: its action table is simulated with the
             measured stage times of the step, while messages and torch's schedule executor take no time
layers, layers_dp2
             steps of which one looks at the layers, compared with the same steps without the time of looking
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.base.activity import ACTIVITY
from hpctrain.bench.comparison import ComparisonRow, TimeSample, compare
from hpctrain.bench.ranks import leave_process_group, run_ranks, timed
from hpctrain.bench.record import make_record
from hpctrain.launch import small_run
from hpctrain.model.build import build_stage
from hpctrain.planner.simulate.engine import StageDurations, simulate
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.schedule.resolve import schedule_of
from hpctrain.worker.build import Trainer
from hpctrain.worker.figures.rank_metrics import FIGURES_OF_LAYERS, GATHER_FIGURES, LEAST_STEPS
from hpctrain.worker.standalone import open_loop

Pairs = list[tuple[TimeSample, TimeSample]]
SPANS_MAX = 100_000
"""Most operations of a window of steps that are recorded."""
LOOKS = (FIGURES_OF_LAYERS, GATHER_FIGURES)
"""Operations in which a rank looks at its layers."""
SPEC = DecoderSpec(layers=6, dim=256, heads=4, vocab=small_run.BYTES_VOCABULARY)


@dataclass(frozen=True)
class ThroughputSettings:
    """Settings of `hpctrain bench runtime`: batch, model, and numbers of steps. The bench compares `pairs` pairs of
    blocks: `block_steps` steps of hpctrain with as many of a plain loop, after `warm_steps` steps that do not count.
    `rows` are the sequences of a process in a step."""

    pairs: int = 30
    block_steps: int = 3
    """Steps of a block; hpctrain and the plain loop make blocks in turns."""
    warm_steps: int = 5
    rows: int = 8
    """Sequences of a process in a step."""
    seq_len: int = 128
    spec: DecoderSpec = SPEC


def measure(cases: tuple[str, ...], settings: ThroughputSettings, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure the named `CASES` one after the other; return the record of the bench.

    Args:
        progress: called with the name of each case before it begins.

    Raises:
        HpctrainError: a process of the bench failed.
    """
    rows = []
    with small_run.temporary_corpus() as folder:
        for case in cases:
            progress(case)
            world, plan, body = CASES[case]
            made = plan(settings)
            small_run.make_run(folder / case, folder / "corpus", settings.spec, made.sequences, settings.seq_len)
            rows.append(run_ranks(body, world, case, folder / case, made, settings))
    return make_record("runtime", rows, asdict(settings) | {"spec": settings.spec.model_dump(exclude_none=True)})


def against_plain(
    rank: int, world: int, case: str, folder: Path, plan: Plan, settings: ThroughputSettings
) -> ComparisonRow:
    """Run one process of a case: time blocks of steps of the worker's loop and blocks of steps of `PlainLoop` in turns,
    and return their comparison. The worker's loop comes first in every second pair of blocks, `PlainLoop` in the
    others.

    Args:
        rank: number of this process.
        world: number of processes.
        case: name of the case, a key of `CASES`.
        folder: run folder of the case.
    """
    trainer, loop = open_loop(rank, world, folder, plan)
    plain = PlainLoop(trainer, distributed=world > 1)
    sides: tuple[Callable[[], object], ...] = (loop.one_step, plain.step)
    for side in sides:
        timed(side, settings.warm_steps)
    pairs: Pairs = []
    for number in range(settings.pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        samples = {side: timed(sides[side], settings.block_steps) for side in order}
        pairs.append((samples[0], samples[1]))
    leave_process_group()
    return compare(case, "torch DDP" if world > 1 else "a plain torch loop", pairs)


def against_ideal(
    rank: int, world: int, case: str, folder: Path, plan: Plan, settings: ThroughputSettings
) -> ComparisonRow:
    """Run one process of a case, and return the comparison of each step's pipeline time with the ideal of its schedule:
    the simulated time with the stage times of that same step and with messages that take no time.

    Args:
        rank: number of this process.
        world: number of processes.
        case: name of the case, a key of `CASES`.
        folder: run folder of the case.
    """
    trainer, loop = open_loop(rank, world, folder, plan)
    schedule, _ = schedule_of(plan, 0)
    pairs: Pairs = []
    for number in range(settings.warm_steps + settings.pairs * settings.block_steps):
        # The first pipeline rank starts last, because it writes the metrics, and its backward pass is the last.
        job = loop.one_step()
        took_s = torch.tensor([trainer.pipeline.step_s if trainer.coordinate.pp == 0 else 0.0], dtype=torch.float64)
        dist.all_reduce(took_s)
        count, nothing = plan.replicas[0].micro_batches, (0.0,) * (len(plan.stages) - 1)
        forward, backward = (
            tuple(time_s / count for time_s in times)
            for times in (job.row["stage_forward_s"], job.row["stage_backward_s"])
        )
        durations = StageDurations(forward, backward, nothing, nothing)
        ideal_s = simulate(schedule, durations).makespan
        if number >= settings.warm_steps:
            pairs.append((TimeSample(float(took_s), 0.0), TimeSample(ideal_s, 0.0)))
    leave_process_group()
    return compare(case, "the ideal of its schedule", pairs, cpu=False)


def against_less(
    rank: int, world: int, case: str, folder: Path, plan: Plan, settings: ThroughputSettings
) -> ComparisonRow:
    """Run one process of a case, and return the comparison of steps with the same steps less the time in which this
    process looked at its layers and gathered the figures.

    Args:
        rank: number of this process.
        world: number of processes.
        case: name of the case, a key of `CASES`.
        folder: run folder of the case.
    """
    _, loop = open_loop(rank, world, folder, plan)
    timed(loop.one_step, settings.warm_steps)
    pairs: Pairs = []
    for _ in range(settings.pairs):
        with ACTIVITY.recorded(SPANS_MAX) as spans:
            whole = timed(loop.one_step, 2 * LEAST_STEPS)
        looked_s = sum(span.end_s - span.start_s for span in spans if span.operation in LOOKS) / (2 * LEAST_STEPS)
        pairs.append((whole, TimeSample(whole.wall_s - looked_s, 0.0)))
    leave_process_group()
    return compare(case, "the same steps without the figures of layers", pairs, cpu=False)


CASES: dict[str, tuple[int, Callable[[ThroughputSettings], Plan], Callable[..., ComparisonRow]]] = {
    "one_process": (1, lambda s: small_run.make_plan(1, 1, s.spec.layers, s.rows, 1), against_plain),
    "dp2": (2, lambda s: small_run.make_plan(1, 2, s.spec.layers, s.rows, 1), against_plain),
    "pp2": (2, lambda s: small_run.make_plan(2, 1, s.spec.layers, s.rows // 4, 8), against_ideal),
    "layers": (1, lambda s: small_run.make_plan(1, 1, s.spec.layers, s.rows, 1), against_less),
    "layers_dp2": (2, lambda s: small_run.make_plan(1, 2, s.spec.layers, s.rows, 1), against_less),
}
"""For each case: its number of processes, the function that makes its plan, and the function that each process runs."""


class PlainLoop:
    """A plain torch training loop, in one process or in several with torch's DistributedDataParallel. Its model, data
    and optimizer settings are those of `trainer`'s run."""

    def __init__(self, trainer: Trainer, distributed: bool) -> None:
        run, spec = trainer.run, trainer.run.spec()
        self._trainer = trainer
        self._module = build_stage(spec, 0, spec.layers, run.seed)
        self._model: nn.Module = DistributedDataParallel(self._module) if distributed else self._module
        settings = run.optimizer
        parameters = list(self._module.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True,
        )  # fmt: skip
        self._clip_norm = settings.clip_norm
        self._step = 0

    def step(self) -> float:
        """Make one optimizer step on this process's share of the batch; return the mean loss of that share."""
        trainer = self._trainer
        first, count = trainer.rows
        start = self._step * trainer.plan.sequences + first
        batch = trainer.train.batch(trainer.run.seed, start, count)
        loss = F.cross_entropy(self._model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        loss.backward()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._module.parameters(), self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return float(loss.detach())
