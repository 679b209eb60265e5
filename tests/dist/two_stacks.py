"""A stand-in for a model that reads one text and writes another, over two pipeline stages, against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.corpus.objective import examples
from hpctrain.corpus.special import SpecialTokens
from hpctrain.records.objective import SpanCorruption, lengths

OBJECTIVE = SpanCorruption(mode="span_corruption")


class TwoStacks(nn.Module):
    """The mean of the input's embeddings, added to those of the decoder's tokens."""

    def __init__(self, vocab: int, dim: int, first: bool, last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        torch.manual_seed(0)
        embedding, words, head = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.embedding = embedding if first else None
        self.words, self.head = (words, head) if last else (None, None)

    def forward(self, x: Tensor, decoder_tokens: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        if self.words is not None and self.head is not None:
            x = self.head(x.mean(1, keepdim=True) + self.words(decoder_tokens))
        return x


def stage(spec: Any, start: int, stop: int, *, first: bool, last: bool, seed: int) -> TwoStacks:
    """In place of `build_part`."""
    return TwoStacks(spec.vocabulary, spec.dim, first, last)


def batch(seq_len: int, rows: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and decoder tokens of one batch."""
    sizes = lengths(OBJECTIVE, seq_len)
    special = SpecialTokens(vocab - 10, vocab, end_of_text=0, start=1, sentinels=tuple(range(vocab - 1, vocab - 9, -1)))
    tokens = np.random.default_rng(0).integers(2, vocab - 10, (rows, sizes.raw + 1))
    made = examples(OBJECTIVE, special, seq_len, 0, np.arange(rows), tokens)
    assert made.decoder_tokens is not None
    return torch.from_numpy(made.inputs), torch.from_numpy(made.targets), torch.from_numpy(made.decoder_tokens)


def alone(vocab: int, dim: int, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients of the whole model in one process."""
    model = TwoStacks(vocab, dim, first=True, last=True)
    inputs, targets, decoder_tokens = parts
    loss = F.cross_entropy(model(inputs, decoder_tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}
