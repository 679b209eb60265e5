"""Evaluate a checkpoint on other data: this module checks the request, a worker process computes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import CheckpointError, InputError
from hpctrain.base.process import Runner
from hpctrain.checkpoint.published import folder_name, listed, newest, verify
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.read.index import describe_tokenizer, read_index, same_tokens, tokenizer_option
from hpctrain.corpus.read.tokens import Split
from hpctrain.launch.worker_request import ask_worker
from hpctrain.records.corpus import INDEX_NAME, CorpusIndex
from hpctrain.records.history.metric import perplexity
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.trust import check_trusted


@dataclass(frozen=True)
class CheckpointEvaluation:
    """The loss of a checkpoint on one corpus."""

    path: str
    """The data as named on the command line."""
    loss: float
    """Mean cross-entropy, nats per target."""
    perplexity: float | None
    """exp(loss); None if it is too large for a float."""
    samples: int
    """Number of sequences that were evaluated."""
    tokens: int
    """Number of tokens in these sequences."""
    targets: int
    """Number of targets that `loss` is the mean over."""


def evaluate(
    folder: Path, data: Sequence[str], step: int | None, split: Split, samples: int | None, runner: Runner
) -> tuple[int, list[CheckpointEvaluation]]:
    """Return the step of the checkpoint, and its result on each of `data`.

    An item of `data` is a corpus folder, or text, from which the run's tokenizer makes a temporary corpus.

    Args:
        step: step of the checkpoint; None: the newest complete one.
        split: which part of corpus folders; text has no parts.
        samples: most sequences of each item; None: all.

    Raises:
        InputError: there is no such checkpoint, or the run's model cannot read the data.
        CheckpointError: the checkpoint's files differ from what was written.
        HpctrainError: the worker failed.
    """
    check_trusted(folder)
    run = run_of(folder)
    checkpoint = checkpoint_of(folder, step, run.spec().sha256())
    with _corpora(run, data) as corpora:
        question = {
            "folder": str(folder.resolve()),
            "checkpoint": str(checkpoint.resolve()),
            "data": [str(path.resolve()) for path in corpora],
            "split": split,
            "samples": samples,
        }
        sets = list(ask_worker("eval", question, runner, "evaluates")["sets"])
    judged = [
        CheckpointEvaluation(
            name, item["loss"], perplexity(item["loss"]),
            item["samples"], item["samples"] * run.data.seq_len, item["targets"],
        )
        for name, item in zip(data, sets, strict=True)
    ]  # fmt: skip
    return int(checkpoint.name.rpartition("-")[2]), judged


def checkpoint_of(folder: Path, step: int | None, model_sha256: str) -> Path:
    """Return the folder of a run's checkpoint, verified. A step of None means the newest checkpoint.

    Raises:
        InputError: the run has no such checkpoint.
        CheckpointError: the checkpoint's files differ from what was written.
    """
    checkpoints = folder / "checkpoints"
    if step is None:
        checkpoint, skipped = newest(checkpoints, model_sha256)
        if checkpoint is None:
            why = f" ({skipped[0].path.name}: {skipped[0].reason})" if skipped else ""
            raise InputError(f"{folder}: has no checkpoint yet{why}; it gets one every checkpoint.every steps")
        return checkpoint.path
    path = checkpoints / folder_name(step)
    there = listed(checkpoints)
    if path not in there:
        steps = ", ".join(str(int(item.name.rpartition("-")[2])) for item in there) or "none"
        raise InputError(f"--step {step}: {folder} has no checkpoint of that step; it has: {steps}")
    try:
        verify(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; leave --step out for the newest that is whole") from None
    return path


@contextlib.contextmanager
def _corpora(run: Run, data: Sequence[str]) -> Iterator[list[Path]]:
    """Yield a corpus folder for each of `data`. Folders made from text are removed when the context ends."""
    home = run.data.train_folders[0]
    index = read_index(home, "data.train[0]")
    with tempfile.TemporaryDirectory(prefix="hpctrain-eval-") as made:
        yield [_corpus(Path(path), Path(made) / str(number), home, index) for number, path in enumerate(data)]


def _corpus(path: Path, made: Path, home: str, index: CorpusIndex) -> Path:
    tokenizer = tokenizer_option(home, index).removeprefix("--tokenizer ")
    if not (path / INDEX_NAME).exists():
        if not path.exists():
            raise InputError(f"DATA: {path}: no such file or folder; name corpus folders, or text")
        prepare([path], made, PrepareOptions(tokenizer=tokenizer, valid_fraction=0.0))
        return made
    corpus = read_index(path, "DATA")
    if not same_tokens(corpus, index):
        raise InputError(
            f"DATA: {path}: its tokenizer ({describe_tokenizer(corpus)}) is not that of the run "
            f"({describe_tokenizer(index)}); name the text itself, or prepare it again with --tokenizer {tokenizer}"
        )
    return path
