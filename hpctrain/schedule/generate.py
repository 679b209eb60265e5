"""Makes the named pipeline schedules as tables of compute actions.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-flush). Interleaved 1F1B: Narayanan et al. 2021,
section 2.2, with rounds that need not be as long as the pipeline (see `rounds`). Zero bubble: Qi et al. 2024; `rounds`
makes it for interleaved stages, `v_shape` for stages in a V.
"""

from __future__ import annotations

from functools import lru_cache

from hpctrain.records.plan.schedule import Action, Schedule
from hpctrain.schedule.placement import V_SHAPED_SCHEDULES
from hpctrain.schedule.rounds import interleaved
from hpctrain.schedule.v_shape import zbv

SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
"""Schedules that can be made by name."""
SPLIT_BACKWARD_SCHEDULES = ("interleaved_zero_bubble", "zbv")
"""Schedules that split each backward pass into one for inputs (I) and one for weights (W)."""


@lru_cache(maxsize=4096)
def make_schedule(name: str, pp: int, stages: int, micro_batches: int) -> Schedule:
    """Return the action table of a named schedule; `stage_ranks` says which pipeline rank holds each stage.

    Args:
        pp: number of pipeline ranks.
        stages: number of stages in all: `pp` for gpipe and 1f1b, a larger multiple of `pp` for interleaved_1f1b, any
            multiple for interleaved_zero_bubble, 2·pp for zbv.
        micro_batches: at least 1; with fewer than `pp`, 1f1b has fewer warm-up forwards.

    Raises:
        ValueError: the schedule is unknown or not defined for these numbers.
    """
    reason = why_no_schedule(name, pp, stages, micro_batches)
    if reason:
        raise ValueError(reason)
    if name in ("interleaved_1f1b", "interleaved_zero_bubble"):
        return interleaved(pp, stages, micro_batches, split=name in SPLIT_BACKWARD_SCHEDULES)
    if name == "zbv":
        return zbv(pp, micro_batches)
    warmups = [micro_batches if name == "gpipe" else min(micro_batches, pp - rank) for rank in range(pp)]
    return Schedule(tuple(_fill_drain(rank, warmup, micro_batches) for rank, warmup in enumerate(warmups)))


def why_no_schedule(name: str, pp: int, stages: int, micro_batches: int) -> str | None:
    """Return why `make_schedule` has no table for these numbers, as one clause; None if it has one."""
    if pp < 1 or micro_batches < 1:
        return f"pp {pp} and micro_batches {micro_batches}: both start at 1"
    if name not in SCHEDULE_NAMES:
        return f"schedule: found {name!r}, allowed: {', '.join(SCHEDULE_NAMES)}"
    refusal = f"schedule {name}: found {stages} stages on {pp} pipeline ranks, allowed:"
    if name in V_SHAPED_SCHEDULES:
        return None if stages == 2 * pp else f"{refusal} two stages a rank"
    if name in ("gpipe", "1f1b"):
        return None if stages == pp else f"{refusal} one stage a rank"
    least = 2 if name == "interleaved_1f1b" else 1
    if stages % pp == 0 and stages >= least * pp:
        return None
    return f"{refusal} at least {('one stage', 'two stages')[least - 1]} a rank, as many on each"


def _fill_drain(stage: int, warmup: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of a stage: `warmup` forwards, then forward and backward in turns, then the remaining
    backwards.
    """
    actions = [Action(stage, "F", index) for index in range(warmup)]
    for index in range(micro_batches):
        actions.append(Action(stage, "B", index))
        if warmup + index < micro_batches:
            actions.append(Action(stage, "F", warmup + index))
    return tuple(actions)
