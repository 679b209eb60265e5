"""How many micro-batches' activations the stages of a pipeline rank keep, by schedule."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hpctrain.schedule.generate import (
    SPLIT_BACKWARD_SCHEDULES,
    V_SHAPED_SCHEDULES,
    make_schedule,
    stages_by_rank,
    visit_order,
    warmup_count,
)

LiveCounts = tuple[tuple[int, ...], ...]
"""[moment][stage of a rank] -> number of micro-batches whose activations the stage keeps at that moment."""


@lru_cache(maxsize=4096)
def live_micro_batches(schedule: str, pp: int, stages: int, micro_batches: int) -> tuple[LiveCounts, ...]:
    """Return how many micro-batches' activations each stage of a pipeline rank keeps when the rank keeps the most.

    Activations count from F until B, or until W with split backwards. Tables of gpipe and 1f1b are fullest after their
    warm-up. With split backwards and one stage a rank, W lags behind F so that all ranks are equally full.

    Args:
        schedule: name of the schedule.
        stages: number of stages of the model, over all `pp` ranks.
        micro_batches: number of micro-batches of the replica in a step.

    Returns:
        [rank] -> moments, each with a number for every stage of the rank. A moment is left out if another one has at
        least as many micro-batches in every stage.
    """
    if schedule == "gpipe":
        return (((micro_batches,),),) * pp
    if schedule == "1f1b":
        return tuple(((min(pp - rank, micro_batches),),) for rank in range(pp))
    if schedule in V_SHAPED_SCHEDULES:
        return _counts_of_table(schedule, pp, stages, micro_batches)
    if stages == pp:
        return (((min(pp, micro_batches),),),) * pp
    return _interleaved(schedule in SPLIT_BACKWARD_SCHEDULES, pp, stages // pp, micro_batches)


def _counts_of_table(schedule: str, pp: int, stages: int, micro_batches: int) -> tuple[LiveCounts, ...]:
    # The pattern repeats itself from 2 · pp micro-batches on.
    table = make_schedule(schedule, pp, stages, min(micro_batches, 2 * pp))
    return tuple(
        _counts_of_rank([(stages_of_rank.index(action.stage), action.kind) for action in row], len(stages_of_rank))
        for row, stages_of_rank in zip(table.ranks, stages_by_rank(schedule, pp, stages), strict=True)
    )


def _counts_of_rank(actions: list[tuple[int, str]], chunks: int) -> LiveCounts:
    live, moments = [0] * chunks, set()
    for chunk, kind in actions:
        live[chunk] += {"F": 1, "I": 0}.get(kind, -1)
        if kind == "F":
            moments.add(tuple(live))
    return _maximal_counts(moments)


def _interleaved(splits: bool, pp: int, chunks: int, micro_batches: int) -> tuple[LiveCounts, ...]:
    """Return the live activations of interleaved schedules, as `live_micro_batches` does, without making the action
    table.

    All ranks have the same order of actions, each with its own number of warm-up forwards.

    Args:
        splits: whether the schedule splits the backward into I and W.
        chunks: stages on each rank.
    """
    order = np.array([chunk for chunk, _ in visit_order(pp, chunks, micro_batches)])
    # [chunk, n] -> visits of the chunk among the first n; backwards visit the chunks in the opposite order.
    forwards = np.zeros((chunks, len(order) + 1), dtype=np.int64)
    forwards[:, 1:] = (order == np.arange(chunks)[:, None]).cumsum(axis=1)
    backwards = forwards[::-1]
    counts = []
    for rank in range(pp):
        warmup = warmup_count(rank, pp, chunks, micro_batches, splits)
        turns = np.arange(len(order) - warmup)
        # Just after each forward; W lags behind by as many actions as the rank's number.
        freed = np.maximum(turns - (rank if splits else 0), 0)
        live = forwards[:, warmup + turns + 1] - backwards[:, freed] if len(turns) else forwards[:, -1:]
        counts.append(_maximal_counts(_columns(live)))
    return tuple(counts)


def _columns(values: NDArray[np.int64]) -> set[tuple[int, ...]]:
    return set(map(tuple, values.T.tolist()))


def _maximal_counts(moments: set[tuple[int, ...]]) -> LiveCounts:
    fullest: list[tuple[int, ...]] = []
    for moment in sorted(moments, reverse=True):
        if len(moment) == 2:
            # Of two stages, the first has more in all moments before; so the second has to have more than in these.
            if not fullest or moment[1] > fullest[-1][1]:
                fullest.append(moment)
        elif not any(all(x >= y for x, y in zip(other, moment, strict=True)) for other in fullest):
            fullest.append(moment)
    return tuple(fullest)
