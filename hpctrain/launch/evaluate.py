"""Evaluates a run's model on given data. This module checks the request and tokenizes text; worker processes compute
the loss."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InputError
from hpctrain.base.process import Runner
from hpctrain.checkpoint.published import step_of
from hpctrain.corpus.prepare.options import PrepareOptions, Progress, no_progress
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.read.tokens import Split, describe_tokenizer, read_index, same_tokens, tokenizer_option
from hpctrain.launch.checkpoints import ask_worker, read_checkpoint
from hpctrain.records.corpus import INDEX_NAME, CorpusIndex
from hpctrain.records.history.run_log import perplexity
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.folder import check_trusted

_PROGRESS_S = 1.0
"""Pause in seconds between two looks at the progress of the worker."""


@dataclass(frozen=True)
class CheckpointEvaluation:
    """The loss of a checkpoint on one corpus."""

    path: str
    """The corpus folder or text, as named on the command line."""
    loss: float
    """Mean cross-entropy, nats per target."""
    perplexity: float | None
    """exp(loss); None if it is too large for a float."""
    samples: int
    """Number of sequences that were evaluated."""
    tokens: int
    """Number of tokens in the evaluated sequences."""
    targets: int
    """Number of targets that `loss` is the mean over."""


def evaluate(
    folder: Path, data: Sequence[str], step: int | None, split: Split, samples: int | None, runner: Runner,
    processes: int = 1, pp: int = 1, progress: Progress = no_progress,
) -> tuple[int, list[CheckpointEvaluation]]:  # fmt: skip
    """Return the step of the evaluated checkpoint, and one result for each item of `data`, in order.

    Args:
        folder: the run folder.
        data: paths of corpus folders or of text, from which the run's tokenizer makes temporary corpora.
        step: step of the checkpoint; 0: the model before training; None: the newest complete checkpoint.
        split: the part of a corpus folder to evaluate; a text is evaluated as a whole.
        samples: most sequences to evaluate of each item of `data`; None: all.
        processes: number of processes of this machine that share the sequences; with GPUs, one a GPU.
        pp: number of pipeline stages into which each replica of the model is cut, a divisor of `processes`.
        progress: called with the phase in words, and how much of it is done and planned; every second in the phase
            that takes longest, from a thread of its own.

    Raises:
        InputError: there is no such checkpoint, others can write to the run folder, the data is missing or has
            another tokenizer than the run, or the model cannot be cut into `pp` stages.
        CheckpointError: the checkpoint's files differ from what was written.
        HpctrainError: a worker failed or cannot be started, or a temporary corpus cannot be written.
    """
    check_trusted(folder)
    run = run_of(folder)
    _check_cut(run.spec(), processes, pp)

    def ask(checkpoint: Path | None) -> tuple[int, dict[str, Any]]:
        with _corpora(run, data, progress) as corpora, _followed(run.data.seq_len, progress) as file:
            return step_of(checkpoint), ask_worker(
                "eval", folder, checkpoint, runner, "evaluates", data=[str(path.resolve()) for path in corpora],
                split=split, samples=samples, processes=processes, pp=pp, progress=str(file),
            )  # fmt: skip

    done, answer = read_checkpoint(folder, step, run.spec().sha256(), ask)
    judged = [
        CheckpointEvaluation(
            name, item["loss"], perplexity(item["loss"]),
            item["samples"], item["samples"] * run.data.seq_len, item["targets"],
        )
        for name, item in zip(data, answer["sets"], strict=True)
    ]  # fmt: skip
    return done, judged


def _check_cut(spec: Spec, processes: int, pp: int) -> None:
    """Check that the model can be cut into `pp` stages, and that the processes form whole replicas of `pp` processes.

    Args:
        processes: number of processes.

    Raises:
        InputError: one of the two is not so; the message says what is allowed.
    """
    if processes % pp:
        raise InputError(f"--pp {pp}: a replica has one process a stage; allowed: divisors of --processes {processes}")
    if pp > spec.layers:
        raise InputError(f"--pp {pp}: the model has {spec.layers} layers; allowed: up to one stage a layer")
    refusal = spec.pipeline_error(pp)
    if refusal is not None:
        raise InputError(f"--pp {pp}: {refusal}; use --pp 1")


@contextlib.contextmanager
def _followed(seq_len: int, progress: Progress) -> Iterator[Path]:
    """Yield the path of a file. Until the context ends, `progress` is called with what the worker writes to the file:
    'DONE TOTAL', in sequences of `seq_len` tokens."""
    over = threading.Event()

    def follow(file: Path) -> None:
        while not over.wait(_PROGRESS_S):
            with contextlib.suppress(OSError, ValueError):  # not there yet
                done, total = map(int, file.read_text().split())
                progress(f"evaluating {total:,} sequences of {seq_len:,} tokens", done, total)

    with tempfile.TemporaryDirectory(prefix="hpctrain-eval-") as made:
        thread = threading.Thread(target=follow, args=(Path(made) / "progress",), daemon=True)
        thread.start()
        try:
            yield Path(made) / "progress"
        finally:
            over.set()
            thread.join()


@contextlib.contextmanager
def _corpora(run: Run, data: Sequence[str], progress: Progress) -> Iterator[list[Path]]:
    """Yield a list with a corpus folder for each path in `data`, in order: the path itself, or a corpus folder made of
    the text at the path. Folders made from text are removed when the context ends."""
    home = run.data.train_folders[0]
    index = read_index(home, "data.train[0]")
    with tempfile.TemporaryDirectory(prefix="hpctrain-eval-") as made:
        yield [_corpus(Path(path), Path(made) / str(number), home, index, progress) for number, path in enumerate(data)]


def _corpus(path: Path, made: Path, home: str, index: CorpusIndex, progress: Progress) -> Path:
    tokenizer = tokenizer_option(home, index).removeprefix("--tokenizer ")
    if not (path / INDEX_NAME).exists():
        if not path.exists():
            raise InputError(f"DATA: {path}: no such file or folder; name corpus folders, or text")
        prepare([path], made, PrepareOptions(tokenizer=tokenizer, valid_fraction=0.0), progress)
        return made
    corpus = read_index(path, "DATA")
    if not same_tokens(corpus, index):
        raise InputError(
            f"DATA: {path}: its tokenizer ({describe_tokenizer(corpus)}) is not that of the run "
            f"({describe_tokenizer(index)}); name the text itself, or prepare it again with --tokenizer {tokenizer}"
        )
    return path
