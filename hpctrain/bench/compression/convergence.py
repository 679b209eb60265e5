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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from hpctrain.base.errors import InputError
from hpctrain.bench.compression.bench_trainer import BenchTrainer
from hpctrain.bench.compression.methods import AUTO, METHODS, MethodContext
from hpctrain.bench.compression.planned_codec import ChoiceRequest, StepWorkload
from hpctrain.bench.compression.step_times import make_text
from hpctrain.bench.ranks import run_ranks
from hpctrain.bench.record import RowStore
from hpctrain.corpus.input.sample_text import TextLocation, document_locations, find_sample_text, standard_library
from hpctrain.corpus.prepare.shards import file_sha256
from hpctrain.corpus.read.tokens import Corpus
from hpctrain.lab.spec import rate_bits_per_s
from hpctrain.model.build import build_stage
from hpctrain.records.model.decoder_spec import DecoderSpec

REFERENCE = "dense"
"""The method with exact sums, whose losses the others are compared with."""
SMALL_SPEC = DecoderSpec(layers=3, dim=128, heads=4, vocab=320)
"""A model of 0.68 M parameters, whose tokens are bytes."""
SEARCH_SPEC = DecoderSpec(layers=2, dim=64, heads=4, ffn_dim=144, vocab=320)
"""A model of 0.13 M parameters, with which the best learning rate of each method is found."""
MODELS = {"0.13m": SEARCH_SPEC, "0.68m": SMALL_SPEC}
"""Name of a model of the bench, by its number of parameters -> model."""
SEARCH_SEED = 0
"""Seed of the trainings that find the best learning rates. It is no seed of a usual comparison, so a rate is not
chosen by the losses that are compared."""
VALIDATION_ROWS = 256
LOSS_BUDGET = 0.01
"""The `loss_budget` for which the planner chooses the codec of the method auto."""
_AUTO_AT = f"{AUTO}_"
TextName = Literal["mixed", "documents", "code"]
TEXTS: dict[TextName, Callable[[], Sequence[TextLocation]]] = {
    "mixed": lambda: (*document_locations(), standard_library()),
    "documents": document_locations,
    "code": lambda: (standard_library(),),
}
"""Name of a sample text -> function that returns where on this machine its files lie. No text has files of installed
Python packages, which differ between environments of one machine. The standard library alone has at least 11 MB."""


@dataclass(frozen=True)
class ConvergenceSettings:
    """Settings of the trainings that `--convergence` compares: steps, batch, optimizer, texts and model. All are equal
    for every method and seed, except that the learning rate may be each method's best."""

    workers: int = 4
    steps: int = 2000
    dense_steps: int = 100
    """Warm-up steps of the methods that have a warm-up: the first steps, which sum gradients exactly. Low-rank methods
    have a tenth of all steps, if that is more."""
    rows: int = 4
    """Sequences of a worker in a step."""
    seq_len: int = 128
    learning_rates: tuple[float, ...] = (2e-3,)
    """Peak learning rates. Of several, each method gets the one with which it has the lowest loss in trainings of
    `SEARCH_SPEC` on the first text."""
    warmup_share: float = 0.05
    """Share of the steps in which the learning rate rises linearly; then it falls to a tenth along a cosine."""
    clip_norm: float = 1.0
    validations: int = 40
    """Number of validations in a training, with at least ten steps between two of them."""
    text_bytes: int = 8_000_000
    """Bytes of each sample text (files of this machine, such as manual pages) to use. A token is a byte, so the default
    training sees half of the text once.
    """
    texts: tuple[TextName, ...] = ("mixed",)
    """Sample texts; all methods and seeds are trained on each of them."""
    spec: DecoderSpec = SMALL_SPEC

    def learning_rate(self, step: int, peak: float) -> float:
        """Return the learning rate of step number `step`, counted from 0. The learning rate rises linearly to `peak`,
        then falls to a tenth of `peak` along a cosine."""
        rise = max(1, round(self.warmup_share * self.steps))
        if step < rise:
            return peak * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        return peak * (0.55 + 0.45 * math.cos(math.pi * done))

    def validated_after(self, step: int) -> bool:
        """Return whether to validate after `step` steps: after the last one, and about `validations` times at equal
        intervals of at least ten steps.
        """
        return step == self.steps or step % max(10, self.steps // self.validations) == 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"spec": _spec_json(self.spec)}

    def shared(self) -> dict[str, Any]:
        """Return the settings that all rows of a file share, as JSON values: all but learning rates, texts and model,
        which are in the rows."""
        return {key: value for key, value in self.as_json().items() if key not in ("learning_rates", "texts", "spec")}


class TrainingCase(NamedTuple):
    """One training: the method and what it trains."""

    method: str
    seed: int
    text: TextName
    learning_rate: float
    """Peak learning rate."""
    spec: DecoderSpec

    def key(self) -> dict[str, Any]:
        """Return the fields by which the row of this training is found."""
        return self._asdict() | {"spec": _spec_json(self.spec)}


def auto_at(rate: str) -> str:
    """Return the name of the method whose codec the planner chooses for links of a rate, as auto_100mbit."""
    return _AUTO_AT + rate


def _spec_json(spec: DecoderSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude_none=True)


@dataclass(frozen=True)
class Training:
    """Result of one training: `curve` has (steps made, validation loss), `loss` is the last one. `diverged_step` is
    None unless the loss became infinite or NaN. `cpu_s` and the bytes are means for one worker and step."""

    curve: list[tuple[int, float]]
    """Pairs (steps made, validation loss). The curve ends early if the loss became infinite or NaN."""
    loss: float | None
    """The last validation loss; None where the training diverged."""
    diverged_step: int | None
    """Number of steps after which the loss was first found infinite or NaN; None if it never was."""
    cpu_s: float
    """CPU seconds of a worker in a step, mean over steps and workers."""
    late_sent_bytes: float | None
    """The same as `sent_bytes` over the second half of the steps, in which no method warms up."""
    sent_bytes: float | None
    """Payload bytes that a worker sent in a step, mean; None where the method does not count."""
    choice: str | None = None
    """The codec that the planner chose; None for a method that does not ask the planner."""


@dataclass(frozen=True)
class LossComparison:
    """The trainings that are compared, and the search of the learning rates."""

    rows: list[dict[str, Any]]
    """Rows of the compared trainings, with the fields of `TrainingCase` and those of `Training` that are not None."""
    searched: list[dict[str, Any]]
    """Rows of the trainings that found the learning rates; empty if there was only one rate."""
    learning_rates: dict[str, float]
    """Name of a method -> its peak learning rate."""


def compare(
    methods: Sequence[str],
    seeds: Sequence[int],
    settings: ConvergenceSettings,
    path: Path,
    progress: Callable[[str], None],
) -> LossComparison:
    """Train each method with each seed on each text, at the method's best learning rate. A training that has a row in
    the file `path` is not repeated, and a new row is written as soon as its training is done. The comparison also has
    the trainings of other methods and seeds in the file, except those of `SEARCH_SEED`, which found the learning rates,
    unless this seed is among `seeds`.

    The method `REFERENCE`, with which the others are compared, is trained with every seed even if it is not among
    `methods`.

    Args:
        path: the file of the rows.
        progress: called with a line that has the number of trainings, before those of the search and before those of
            the comparison.

    Raises:
        InputError: the file has rows of other settings or another sample text, or this machine has no file for a
            sample text.
        HpctrainError: a process failed, or a row cannot be written; rows that were written before remain.
    """
    names = list(dict.fromkeys((REFERENCE, *methods)))
    searched = _search(names, settings, path, progress) if len(settings.learning_rates) > 1 else []
    peaks, only = best_learning_rates(searched), settings.learning_rates[0]
    cases = [
        TrainingCase(name, seed, text, peaks.get(name, only), settings.spec)
        for seed in seeds
        for text in settings.texts
        for name in names
    ]
    compared = [
        row
        for row in train_missing(cases, settings, path, progress)
        if row["spec"] == _spec_json(settings.spec)
        and row["text"] in settings.texts
        and row["learning_rate"] == peaks.get(row["method"], None if searched else only)
        and not (searched and row["seed"] == SEARCH_SEED and SEARCH_SEED not in seeds)
    ]
    return LossComparison(compared, searched, {row["method"]: row["learning_rate"] for row in compared})


def _search(
    names: Sequence[str], settings: ConvergenceSettings, path: Path, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Train each method at each learning rate; return these rows, and those of other methods in the file."""
    shared = {"seed": SEARCH_SEED, "text": settings.texts[0], "spec": _spec_json(SEARCH_SPEC)}
    cases = [
        TrainingCase(name, SEARCH_SEED, settings.texts[0], rate, SEARCH_SPEC)
        for name in names
        for rate in settings.learning_rates
    ]
    return [
        row
        for row in train_missing(cases, settings, path, progress)
        if shared.items() <= row.items() and row["learning_rate"] in settings.learning_rates
    ]


def best_learning_rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return name of a method -> peak learning rate with the lowest last loss. A training that diverged is worse than
    all others; if all did, the smallest rate is returned."""
    order = sorted(rows, key=lambda row: (row.get("loss", math.inf), row["learning_rate"]), reverse=True)
    return {row["method"]: row["learning_rate"] for row in order}


def train_missing(
    cases: Sequence[TrainingCase], settings: ConvergenceSettings, path: Path, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Make each training of `cases` that has no row in the file `path`, and return all rows of the file.

    Raises:
        InputError: as `compare`.
        HpctrainError: as `compare`.
    """
    store = RowStore(path, settings.shared())
    texts = {text: text_hash(text, settings.text_bytes) for text in dict.fromkeys(case.text for case in cases)}
    for row in store.rows:
        stored, current = row["text_sha256"], texts.get(row["text"])
        if current not in (None, stored):
            raise InputError(
                f"{path}: text_sha256 of its rows of the text {row['text']} is {stored}, and that of the text on this "
                f"machine is {current}. Losses on different texts are not comparable: give -o another folder. Rows of "
                "earlier versions of hpctrain cannot be continued"
            )
    missing = [case for case in cases if store.find(**case.key()) is None]
    if missing:
        progress(f"{len(missing)} of {len(cases)} trainings of {settings.steps} steps with {settings.workers} workers")
        with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name:
            folder = Path(name)
            for text in dict.fromkeys(case.text for case in missing):
                make_text(folder / text, settings.text_bytes, TEXTS[text]())
            run_ranks(train_cases, settings.workers, missing, settings, folder, path, texts)
        store = RowStore(path, settings.shared())
    return store.rows


def text_hash(text: TextName, text_bytes: int) -> str:
    """Return a hash of what a sample text's files contain, in the order in which they are read. Where the files lie
    does not matter. Losses on texts with different hashes are not comparable.

    Raises:
        FileError: a file cannot be opened any more.
    """
    sha256 = hashlib.sha256()
    for path in find_sample_text(text_bytes, TEXTS[text]()).files:
        sha256.update(file_sha256(path).encode())
    return sha256.hexdigest()[:16]


def train_cases(
    rank: int, world: int, cases: Sequence[TrainingCase], settings: ConvergenceSettings, folder: Path, path: Path,
    texts: Mapping[str, str],
) -> None:  # fmt: skip
    """Make the trainings, one after the other, as worker `rank` of `world`; worker 0 writes the rows.

    Args:
        folder: holds a corpus for each text, in a folder with the text's name, and the file through which the workers
            find each other.
        path: file of the rows.
        texts: name of a text -> hash of its files.
    """
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), world), rank=rank, world_size=world)
    # Sums of a method that overlap its backward pass must not interleave with the validation's. The trainings share the
    # group, because torch keeps results of DTensors by the ranks of their mesh and would look up a destroyed group.
    group = dist.new_group(list(range(world)))
    store = RowStore(path, settings.shared()) if rank == 0 else None
    for case in cases:
        training = _train(case, settings, folder / case.text, rank, group)
        if store is not None:
            result = {key: value for key, value in asdict(training).items() if value is not None}
            store.add(case.key() | {"text_sha256": texts[case.text]} | result)
    dist.barrier()
    dist.destroy_process_group()


def _train(
    case: TrainingCase, settings: ConvergenceSettings, corpus: Path, rank: int, group: dist.ProcessGroup
) -> Training:
    world = dist.get_world_size(group)
    train = Corpus.open([corpus], "train", settings.seq_len)
    valid = Corpus.open([corpus], "valid", settings.seq_len)
    # Each worker takes a part of the validation sequences; the parts are equal in all trainings.
    share = min(VALIDATION_ROWS, valid.windows) // world
    valid_rows = torch.from_numpy(valid.rows(0, rank * share, share))
    model = build_stage(case.spec, 0, case.spec.layers, case.seed)
    work = StepWorkload(case.spec, settings.rows, settings.seq_len)
    context = MethodContext(group, settings.dense_steps, work, run_steps=settings.steps)
    name = case.method
    if name.startswith(_AUTO_AT):
        link = (0.0, 8 / rate_bits_per_s(name.removeprefix(_AUTO_AT)))
        name, context = AUTO, replace(context, choice=ChoiceRequest(link, LOSS_BUDGET, settings.steps))
    exchange = METHODS[name](model, context)
    optimizer = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    trainee = BenchTrainer(exchange, optimizer, world, settings.clip_norm)
    curve: list[tuple[int, float]] = []
    sent: list[int | None] = []
    cpu_s, done, loss = 0.0, 0, 0.0
    while done < settings.steps and math.isfinite(loss):
        for group_ in trainee.optimizer.param_groups:
            group_["lr"] = settings.learning_rate(done, case.learning_rate)
        rows = torch.from_numpy(train.rows(case.seed, (done * world + rank) * settings.rows, settings.rows))
        cpu_start = time.process_time()
        sent.append(trainee.step(rows))
        cpu_s += time.process_time() - cpu_start
        done += 1
        if settings.validated_after(done):
            loss = trainee.validate(valid_rows)
            if math.isfinite(loss):
                curve.append((done, loss))
    counted = None not in sent
    late = sent[done // 2 :]
    counts = [float(sum(count or 0 for count in part)) for part in (sent, late)]
    sums = torch.tensor([cpu_s, counts[0], counts[1] * done / len(late)], dtype=torch.float64)
    dist.all_reduce(sums)
    whole = math.isfinite(loss)
    per_step = sums / (world * done)
    return Training(
        curve=curve,
        loss=loss if whole else None,
        diverged_step=None if whole else done,
        cpu_s=float(per_step[0]),
        sent_bytes=float(per_step[1]) if counted else None,
        late_sent_bytes=float(per_step[2]) if counted else None,
        choice=None if exchange.planned is None else exchange.planned.codec.label,
    )
