"""Interleaving: a rank with several stages takes micro-batches through them in rounds (Narayanan et al. 2021).

Rounds are at least as long as the pipeline. Torch requires rounds of equal length. Here the first ones may be longer by
one, so there is a table for any number of micro-batches.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from hpctrain.base.even_parts import even_parts
from hpctrain.records.plan.schedule import Action, Schedule


def interleaved(pp: int, stages: int, micro_batches: int, split: bool) -> Schedule:
    """Interleaved 1F1B; with split backwards the ZB-H1 of Qi et al. 2024 on interleaved stages.

    Args:
        split: each backward is one for inputs (I) and, on rank r, r backwards later one for weights (W).
    """
    return Schedule(tuple(_row(rank, pp, stages // pp, micro_batches, split) for rank in range(pp)))


def _row(rank: int, pp: int, chunks: int, micro_batches: int, split: bool) -> tuple[Action, ...]:
    """The actions of one rank, whose stages are rank, rank + pp, …."""
    visits = visit_order(pp, chunks, micro_batches)
    forwards = [Action(chunk * pp + rank, "F", index) for chunk, index in visits]
    backwards = [((chunks - 1 - chunk) * pp + rank, index) for chunk, index in visits]
    warmup = warmup_count(rank, pp, chunks, micro_batches, split)
    row = forwards[:warmup]
    for turn, (stage, index) in enumerate(backwards):
        row += forwards[warmup + turn : warmup + turn + 1]
        row.append(Action(stage, "I" if split else "B", index))
        if split and turn >= rank:
            late_stage, late_index = backwards[turn - rank]
            row.append(Action(late_stage, "W", late_index))
    if split:
        row += [Action(stage, "W", index) for stage, index in backwards[max(0, len(backwards) - rank) :]]
    return tuple(row)


def warmup_count(rank: int, pp: int, chunks: int, micro_batches: int, split: bool) -> int:
    """Forwards of a rank with `chunks` stages before its first backward and the forward that is paired with it.

    A rank starts two forwards ahead of the next rank, so that gradients arrive without a wait; with split
    backwards one.
    """
    spacing = 1 if split else 2
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
