"""`python -m hpctrain.worker eval`: the loss of a checkpoint of any plan on given corpora, computed in one process.

The request is JSON on the command line, the reply is JSON on stdout: {"sets": …} or {"error": …}.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain.base.errors import HpctrainError
from hpctrain.corpus.read.objective import special_tokens
from hpctrain.corpus.read.tokens import Corpus, Split
from hpctrain.parallel.loss import make_loss
from hpctrain.records.run.objective import lengths
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.code_copy import CODE_FOLDER, import_code_first
from hpctrain.worker.batch_loader import BatchLoader
from hpctrain.worker.build import AUTOCAST
from hpctrain.worker.verbs.json_reply import json_reply
from hpctrain.worker.whole_model import whole_model

BATCH_TOKENS = 4096
"""Tokens of one forward pass: enough to use a device fully, and few enough that the logits take less memory than the
weights."""


@dataclass(frozen=True)
class EvaluateRequest:
    """A request to evaluate a checkpoint: which one, and on which data."""

    folder: str
    """The run folder."""
    checkpoint: str
    """Path of a verified checkpoint folder."""
    data: list[str]
    """Corpus folders; each is evaluated separately."""
    split: Split
    """The part of each corpus that is evaluated: train, valid or all."""
    samples: int | None
    """Largest number of sequences of each corpus; None means all."""


def main(argv: list[str]) -> int:
    """Evaluate the checkpoint that the request names. Return 0, or the exit code of an error that the reply
    describes."""
    question = EvaluateRequest(**json.loads(argv[0]))
    import_code_first(Path(question.folder) / CODE_FOLDER)
    return json_reply(lambda: {"sets": evaluate(question)})


def evaluate(question: EvaluateRequest) -> list[dict[str, Any]]:
    """Return for each corpus, in the order of the request, {"loss": mean loss of a target, "samples": number of
    sequences, "targets": number of targets}.

    Raises:
        InputError, FileError: data is missing, too small or damaged.
        CheckpointError: the checkpoint cannot be loaded.
        HpctrainError: a loss is not finite.
    """
    run = run_of(Path(question.folder))
    device = torch.device("cuda" if run.cluster.device != "cpu" and torch.cuda.is_available() else "cpu")
    objective, seq_len = run.effective_objective(), run.data.seq_len
    special = special_tokens(run.data.train_folders, objective, seq_len)
    length = lengths(objective, seq_len).raw
    corpora = [Corpus.open([path], question.split, length, "DATA") for path in question.data]
    model = whole_model(run, Path(question.checkpoint)).to(device)
    return [
        _judge(
            model,
            BatchLoader(corpus, objective, special, seq_len, device),
            run,
            min(question.samples or windows, windows),
        )
        for corpus, windows in ((corpus, corpus.windows) for corpus in corpora)
    ]


@torch.no_grad()
def _judge(model: nn.Module, loader: BatchLoader, run: Run, samples: int) -> dict[str, Any]:
    """Evaluate the first `samples` sequences of one corpus, in the order that a validation uses. Return {"loss":
    mean loss of a target, "samples": number of sequences, "targets": number of targets}."""
    autocast, loss, total = AUTOCAST[run.precision], make_loss(1, None), 0.0
    rows = max(1, BATCH_TOKENS // run.data.seq_len)
    for start in range(0, samples, rows):
        batch = loader.batch(0, start, min(rows, samples - start))
        named = {} if batch.decoder_tokens is None else {"decoder_tokens": batch.decoder_tokens}
        with torch.autocast(loader.device.type, autocast, enabled=autocast is not None):
            logits = model(batch.inputs, **named)
        total += float(loss(logits, batch.targets))
    if not math.isfinite(total):
        raise HpctrainError(f"the loss is {total}: this checkpoint is of no use; try an earlier one with --step")
    targets = samples * lengths(loader.objective, run.data.seq_len).targets
    return {"loss": total / targets, "samples": samples, "targets": targets}
