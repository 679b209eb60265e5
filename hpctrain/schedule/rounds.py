"""Interleaving: a rank with several stages takes micro-batches through them in rounds (Narayanan et al. 2021).

Rounds are at least as long as the pipeline. Torch requires rounds of equal length. Here the first ones may be longer by
one, so there is a table for any number of micro-batches.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

from hpctrain.base.even_parts import even_parts
from hpctrain.records.plan.schedule import Action


class RankActions(NamedTuple):
    """The actions of a rank: its warm-up, then one backward after the other."""

    warmup: tuple[Action, ...]
    """The forwards before the first backward and the forward that is paired with it."""
    pairs: tuple[tuple[Action | None, tuple[int, int]], ...]
    """For each backward, the forward that comes before it or None, and its (stage, micro-batch)."""


def interleave(rank: int, pp: int, stages: int, micro_batches: int, spacing: int) -> RankActions:
    """The order of forwards and backwards on one rank; its stages are rank, rank + pp, ….

    Args:
        spacing: forwards that a rank starts ahead of the next rank: 2 with whole backwards, so that gradients arrive
            without a wait; 1 with split backwards.
    """
    chunks = stages // pp
    visits = visit_order(pp, chunks, micro_batches)
    forwards = [Action(chunk * pp + rank, "F", index) for chunk, index in visits]
    backwards = [((chunks - 1 - chunk) * pp + rank, index) for chunk, index in visits]
    warmup = warmup_count(rank, pp, chunks, micro_batches, spacing)
    ahead = [*forwards[warmup:], *[None] * warmup]
    return RankActions(tuple(forwards[:warmup]), tuple(zip(ahead, backwards, strict=True)))


def warmup_count(rank: int, pp: int, chunks: int, micro_batches: int, spacing: int) -> int:
    """Forwards of a rank with `chunks` stages before its first backward."""
    return min((chunks - 1) * _rounds(pp, micro_batches)[0] + spacing * (pp - 1 - rank), chunks * micro_batches)


def visit_order(pp: int, chunks: int, micro_batches: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order a rank computes them: a round goes through each chunk in turn."""
    starts = [0, *accumulate(_rounds(pp, micro_batches))]
    return [
        (chunk, index) for start, stop in pairwise(starts) for chunk in range(chunks) for index in range(start, stop)
    ]


def _rounds(pp: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of each round."""
    return even_parts(micro_batches, max(1, micro_batches // pp))
