"""Interleaving: a rank with several stages takes micro-batches through them in rounds (Narayanan et al. 2021).

A round has at least as many micro-batches as the pipeline has ranks. torch requires rounds of equal length. Here the
first rounds may be longer by one, so there is a table for any number of micro-batches.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from hpctrain.base.even_parts import even_parts
from hpctrain.records.plan.schedule import Action, Schedule


def interleaved(pp: int, stages: int, micro_batches: int, split: bool) -> Schedule:
    """Return the table of interleaved 1F1B; with split backwards, of ZB-H1 (Qi et al. 2024) on interleaved stages.

    Args:
        split: whether each backward is one for inputs (I) and, on rank r, r backwards later one for weights (W).
    """
    return Schedule(tuple(_row(rank, pp, stages // pp, micro_batches, split) for rank in range(pp)))


def _row(rank: int, pp: int, chunks: int, micro_batches: int, split: bool) -> tuple[Action, ...]:
    """Return the actions of one rank, whose stages are rank, rank + pp, rank + 2·pp, ..."""
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
    """Return the number of warm-up forwards of a rank with `chunks` stages.

    They come before its first backward and before the forward that is paired with that backward. A rank starts two
    forwards ahead of the next rank, so that gradients arrive without a wait; with split backwards one.
    """
    spacing = 1 if split else 2
    return min((chunks - 1) * _rounds(pp, micro_batches)[0] + spacing * (pp - 1 - rank), chunks * micro_batches)


def visit_order(pp: int, chunks: int, micro_batches: int) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) in the order of a rank's forwards: a round goes through all its stages ("chunks") in
    turn.
    """
    starts = [0, *accumulate(_rounds(pp, micro_batches))]
    return [
        (chunk, index) for start, stop in pairwise(starts) for chunk in range(chunks) for index in range(start, stop)
    ]


def _rounds(pp: int, micro_batches: int) -> tuple[int, ...]:
    """Return the number of micro-batches of each round."""
    return even_parts(micro_batches, max(1, micro_batches // pp))
