"""Assigns stages to pipeline ranks: round robin, or in a V whose last stage lies on the first rank."""

from __future__ import annotations

from functools import lru_cache

V_SHAPED_SCHEDULES = ("zbv",)
"""Schedules with two stages on each rank; the first and the last stage share a rank (Qi et al. 2024, section 6)."""


@lru_cache(maxsize=4096)
def stage_ranks(schedule: str, pp: int, stages: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage.

    Stage s lies on rank s % pp. In a V it lies on rank s on the way down, and on rank 2·pp − 1 − s on the way back.
    """
    if schedule in V_SHAPED_SCHEDULES:
        return tuple(stage if stage < pp else 2 * pp - 1 - stage for stage in range(stages))
    return tuple(stage % pp for stage in range(stages))


@lru_cache(maxsize=4096)
def stages_by_rank(schedule: str, pp: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each pipeline rank, in ascending order."""
    ranks = stage_ranks(schedule, pp, stages)
    return tuple(tuple(stage for stage in range(stages) if ranks[stage] == rank) for rank in range(pp))
