"""Turns sample numbers into tensors: reads windows of the corpus, applies the objective, copies to the device."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpctrain.corpus.read.mixture import Mixture, open_training
from hpctrain.corpus.read.node_cache import cached_folders
from hpctrain.corpus.read.objective import SpecialTokens, examples, special_tokens
from hpctrain.corpus.read.tokens import Corpus, open_named, open_validation
from hpctrain.records.run.objective import AnyObjective, lengths
from hpctrain.records.run.run import Run

UNNAMED_SET = ""
"""Key of the validation set to which the run file gives no name."""


class SampleBatch(NamedTuple):
    """Samples in the form that the pipeline takes."""

    inputs: Tensor
    """Token ids, of shape [sequences, positions]."""
    targets: Tensor
    """Id of the token to predict at each position, of shape [sequences, outputs]; -100 where none is predicted."""
    decoder_tokens: Tensor | None
    """Token ids that the decoder of an encoder-decoder model reads, of shape [sequences, outputs]; None for other
    models."""


SequenceStream = Corpus | Mixture
"""A source of token windows, in an order that a seed shuffles, without an end: one corpus, or a mixture of several."""


@dataclass(frozen=True)
class BatchLoader:
    """Reads windows from a stream, applies the objective and copies the resulting batch to the device."""

    stream: SequenceStream
    objective: AnyObjective
    special: SpecialTokens
    """Ids of the objective's special tokens."""
    seq_len: int
    """Tokens of a sequence: `data.seq_len` of the run file."""
    device: torch.device

    def batch(self, seed: int, start: int, count: int) -> SampleBatch:
        """Return the samples [start, start + count) in the order that the seed gives, on the device."""
        return self.to_device(self.read(seed, start, count))

    def read(self, seed: int, start: int, count: int) -> SampleBatch:
        """Return the samples [start, start + count) in the order that the seed gives, in memory of the host.

        For a GPU the memory is page-locked, so that the copy to the GPU runs beside other work.
        """
        samples = np.arange(start, start + count, dtype=np.int64)
        rows = self.stream.rows(seed, start, count)
        made = examples(self.objective, self.special, self.seq_len, seed, samples, rows)
        parts = [made.inputs, made.targets, made.decoder_tokens]
        tensors = [None if part is None else torch.from_numpy(part) for part in parts]
        if self.device.type == "cuda":
            tensors = [None if tensor is None else tensor.pin_memory() for tensor in tensors]
        return SampleBatch(*tensors)  # type: ignore[arg-type]

    def to_device(self, batch: SampleBatch) -> SampleBatch:
        """Return a copy on the device of a batch from `BatchLoader.read`. On a GPU the copying may still run."""
        moved = (None if part is None else part.to(self.device, non_blocking=True) for part in batch)
        return SampleBatch(*moved)  # type: ignore[arg-type]

    def taken(self, samples: int) -> dict[str, int] | None:
        """Return corpus folder -> number of its samples among the first `samples` of the run; None if the stream is no
        mixture."""
        return self.stream.taken(samples) if isinstance(self.stream, Mixture) else None


class BatchPrefetcher:
    """Reads the batch of the next step in a thread, while the device works on the current step."""

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader
        # A thread starts with GPU 0, where page-locking memory would take memory for another process.
        ready = (lambda: torch.cuda.set_device(loader.device)) if loader.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch", initializer=ready)
        self._asked: tuple[tuple[int, int, int], Future[SampleBatch]] | None = None

    def batch(self, seed: int, start: int, count: int, step_samples: int) -> SampleBatch:
        """Return the samples [start, start + count) as `BatchLoader.batch` does, and start to read the samples of the
        next step.

        Args:
            step_samples: samples in the global batch. The next step's samples are those that begin `step_samples`
                later.
        """
        wanted, following = (seed, start, count), (seed, start + step_samples, count)
        asked, self._asked = self._asked, (following, self._thread.submit(self._loader.read, *following))
        read = asked[1].result() if asked is not None and asked[0] == wanted else self._loader.read(*wanted)
        return self._loader.to_device(read)


def open_batch_loaders(
    run: Run, device: torch.device, environ: Mapping[str, str]
) -> tuple[BatchLoader, dict[str, BatchLoader]]:
    """Open the training data and the validation sets of a run.

    Corpora with a copy in the node cache are read from that copy.

    Args:
        environ: environment variables, which name the folder of the node cache.

    Returns:
        (loader of the training data, loaders of the validation sets by name). The key of a set without a name is
        `UNNAMED_SET`.

    Raises:
        InputError: data is missing, damaged, has too few tokens for one sequence, or was made with another tokenizer.
    """
    data, objective = run.data, run.effective_objective()
    train = cached_folders(data.train_folders, environ)
    special = special_tokens(data.train_folders, objective, data.seq_len)  # not from `train`: copies have no tokenizer
    length = lengths(objective, data.seq_len).raw
    stream = open_training(data.train_folders, data.weights, length, train)
    sets: dict[str, SequenceStream] = {}
    if run.validation.batches:
        valid = cached_folders(data.valid_folders, environ)
        named = dict(zip(data.valid, valid, strict=True)) if isinstance(data.valid, dict) else {}
        held_out = open_validation(train, [] if named else valid, length)
        if held_out is not None:
            sets[UNNAMED_SET] = held_out
        sets.update(open_named(train, named, length))
    loaders = {name: BatchLoader(held_out, objective, special, data.seq_len, device) for name, held_out in sets.items()}
    return BatchLoader(stream, objective, special, data.seq_len, device), loaders
