"""Placements made from the result of the knapsack bound.

The bound gives the number of tensor-parallel groups of each class in the column of each pipeline rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup, distinct_placements


def placements_of_mixtures(
    classes: Sequence[Sequence[TensorParallelGroup]], mixtures: Sequence[Sequence[int]]
) -> list[Placement]:
    """Return placements that assign tensor-parallel groups column by column, and replica by replica.

    A column is the replicas of one pipeline rank. In the first placement, neighbouring groups sum gradients together;
    in the second, they send to each other. Every column has its fast groups in the same replicas, so that as few
    replicas as possible wait for slow ones.

    Args:
        classes: tensor-parallel groups by class, the fastest class first.
        mixtures: [pipeline rank] -> number of groups of each class.
    """
    pp, dp = len(mixtures), sum(mixtures[0])
    kinds = [[kind for kind, number in enumerate(mixture) for _ in range(number)] for mixture in mixtures]
    by_column = [(replica, rank) for rank in range(pp) for replica in range(dp)]
    placements = []
    for order in (by_column, sorted(by_column)):
        waiting = [iter(units) for units in classes]
        rows: list[dict[int, TensorParallelGroup]] = [{} for _ in range(dp)]
        for replica, rank in order:
            rows[replica][rank] = next(waiting[kinds[rank][replica]])
        placements.append(Placement(tuple(row[rank] for rank in range(pp)) for row in rows))
    return distinct_placements(placements)
