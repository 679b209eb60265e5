"""`hpctrain bench compression --convergence`: how each method of gradient synchronisation affects the loss.

The workers are real processes of this machine. They talk over loopback and sum gradients with the code of hpctrain or
torch. Only the time of a step on a slower network is computed, from the counted bytes and CPU seconds.
"""

from __future__ import annotations

import functools
import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.bench.compression.bench_trainer import BenchTrainer
from hpctrain.bench.compression.methods import METHODS, MethodContext, StepWorkload
from hpctrain.bench.compression.step_times import make_text
from hpctrain.bench.ranks import run_ranks
from hpctrain.bench.record import RowStore
from hpctrain.corpus.input.sample_text import find_sample_text
from hpctrain.corpus.read.tokens import Corpus
from hpctrain.model.build import build_stage
from hpctrain.records.model.decoder_spec import DecoderSpec

REFERENCE = "dense"
"""The method with exact sums, whose losses the others are compared with."""
SMALL_SPEC = DecoderSpec(layers=3, dim=128, heads=4, vocab=320)
"""A model of 0.68 M parameters, whose tokens are bytes."""
VALIDATION_ROWS = 256


@dataclass(frozen=True)
class ConvergenceSettings:
    """Settings of the trainings that `--convergence` compares, equal for every method and seed: steps, batch,
    optimizer, text and model."""

    workers: int = 4
    steps: int = 2000
    dense_steps: int = 100
    """Warm-up steps of the methods that have a warm-up: the first steps, which sum gradients exactly."""
    rows: int = 4
    """Sequences of a worker in a step."""
    seq_len: int = 128
    lr: float = 2e-3
    warmup_share: float = 0.05
    """Share of the steps in which the learning rate rises linearly; then it falls to a tenth along a cosine."""
    clip_norm: float = 1.0
    validations: int = 40
    """Number of validations in a training, with at least ten steps between two of them."""
    text_bytes: int = 8_000_000
    """Bytes of the sample text (files of this machine, such as manual pages) to use. A token is a byte, so the default
    training sees half of the text once.
    """
    spec: DecoderSpec = SMALL_SPEC

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step number `step`, counted from 0. The learning rate rises linearly to `lr`,
        then falls to a tenth of `lr` along a cosine."""
        rise = max(1, round(self.warmup_share * self.steps))
        if step < rise:
            return self.lr * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * done))

    def validated_after(self, step: int) -> bool:
        """Return whether to validate after `step` steps: after the last one, and about `validations` times at equal
        intervals of at least ten steps.
        """
        return step == self.steps or step % max(10, self.steps // self.validations) == 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"spec": self.spec.model_dump(exclude_none=True)}


@dataclass(frozen=True)
class Training:
    """Result of training with one method and one seed: `curve` has (steps made, validation loss), `loss` is the last
    one. `diverged_step` is None unless the loss became infinite or NaN. `cpu_s` and `sent_bytes` are means for one
    worker and step."""

    method: str
    seed: int
    curve: list[tuple[int, float]]
    """Pairs (steps made, validation loss). The curve ends early if the loss became infinite or NaN."""
    loss: float | None
    """The last validation loss; None where the training diverged."""
    diverged_step: int | None
    """Number of steps after which the loss was first found infinite or NaN; None if it never was."""
    cpu_s: float
    """CPU seconds of a worker in a step, mean over steps and workers."""
    sent_bytes: float | None
    """Payload bytes that a worker sent in a step, mean; None where the method does not count."""


def train_all(
    methods: Sequence[str],
    seeds: Sequence[int],
    settings: ConvergenceSettings,
    path: Path,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Train each pair of method and seed that has no row in the file `path`, write each row as soon as it is done, and
    return all rows of the file.

    The method `REFERENCE`, with which the others are compared, is trained with every seed even if it is not among
    `methods`.

    Args:
        path: the file of the rows.
        progress: called with the number of trainings before the first one.

    Raises:
        InputError: the file has rows of other settings or another sample text, or this machine has no file for the
            sample text.
        HpctrainError: a process failed, or a row cannot be written; rows that were written before remain.
    """
    alike = what_rows_share(settings)
    store = RowStore(path, alike)
    wanted = [(name, seed) for seed in seeds for name in dict.fromkeys((REFERENCE, *methods))]
    missing = [(name, seed) for name, seed in wanted if store.find(method=name, seed=seed) is None]
    if missing:
        progress(f"{len(missing)} of {len(wanted)} trainings of {settings.steps} steps with {settings.workers} workers")
        with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name:
            folder = Path(name)
            make_text(folder / "corpus", settings.text_bytes)
            run_ranks(train_jobs, settings.workers, missing, settings, folder, path, alike)
        store = RowStore(path, alike)
    return store.rows


def what_rows_share(settings: ConvergenceSettings) -> dict[str, Any]:
    """Return what all rows of a file must share so that their losses are comparable: the settings, and a hash of the
    paths and sizes of the sample text's files. A package that is installed between two trainings can change the sample
    text."""
    text = hashlib.sha256()
    for path in find_sample_text(settings.text_bytes).files:
        text.update(f"{path} {path.stat().st_size}\n".encode())
    return settings.as_json() | {"text": text.hexdigest()[:16]}


def train_jobs(
    rank: int, world: int, jobs: Sequence[tuple[str, int]], settings: ConvergenceSettings, folder: Path, path: Path,
    alike: dict[str, Any],
) -> None:  # fmt: skip
    """Train the model with each pair (method, seed) of `jobs`, one after the other, as worker `rank` of `world`; worker
    0 writes the rows.

    Args:
        folder: holds the corpus and the file through which the workers find each other.
        path: file of the rows.
        alike: what all rows of the file share.
    """
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), world), rank=rank, world_size=world)
    store = RowStore(path, alike) if rank == 0 else None
    for method, seed in jobs:
        training = _train(method, seed, settings, folder / "corpus", rank, world)
        if store is not None:
            store.add({key: value for key, value in asdict(training).items() if value is not None})
    dist.barrier()
    dist.destroy_process_group()


def _train(method: str, seed: int, settings: ConvergenceSettings, corpus: Path, rank: int, world: int) -> Training:
    train = Corpus.open([corpus], "train", settings.seq_len)
    valid = Corpus.open([corpus], "valid", settings.seq_len)
    # Each worker takes a part of the validation sequences; the parts are equal in all trainings.
    share = min(VALIDATION_ROWS, valid.windows) // world
    valid_rows = torch.from_numpy(valid.rows(0, rank * share, share))
    group = dist.new_group(list(range(world)))
    model = build_stage(settings.spec, 0, settings.spec.layers, seed)
    work = StepWorkload(settings.spec, settings.rows, settings.seq_len)
    exchange = METHODS[method](model, MethodContext(group, settings.dense_steps, work))
    optimizer = functools.partial(torch.optim.AdamW, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    trainee = BenchTrainer(exchange, optimizer, world, settings.clip_norm)
    curve: list[tuple[int, float]] = []
    sent: list[int | None] = []
    cpu_s, done, loss = 0.0, 0, 0.0
    while done < settings.steps and math.isfinite(loss):
        for group_ in trainee.optimizer.param_groups:
            group_["lr"] = settings.learning_rate(done)
        rows = torch.from_numpy(train.rows(seed, (done * world + rank) * settings.rows, settings.rows))
        cpu_start = time.process_time()
        sent.append(trainee.step(rows))
        cpu_s += time.process_time() - cpu_start
        done += 1
        if settings.validated_after(done):
            loss = trainee.validate(valid_rows)
            if math.isfinite(loss):
                curve.append((done, loss))
    counted = None not in sent
    sums = torch.tensor([cpu_s, float(sum(count or 0 for count in sent))], dtype=torch.float64)
    dist.all_reduce(sums)
    dist.destroy_process_group(group)
    whole = math.isfinite(loss)
    per_step = sums / (world * done)
    return Training(
        method=method,
        seed=seed,
        curve=curve,
        loss=loss if whole else None,
        diverged_step=None if whole else done,
        cpu_s=float(per_step[0]),
        sent_bytes=float(per_step[1]) if counted else None,
    )
