"""Makes the named pipeline schedules as tables of compute actions, and says which rank holds each stage.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-flush). Interleaved 1F1B: Narayanan et al. 2021,
section 2.2. Zero bubble: Qi et al. 2024.

Interleaving: a rank with several stages takes micro-batches through its stages in rounds: all micro-batches of a round
pass one stage, then the next one. A round has at least as many micro-batches as the pipeline has ranks, or all
micro-batches if there are fewer. torch requires rounds of equal length. In hpctrain's tables the first rounds may have
one micro-batch more than the later ones, so there is a table for any number of micro-batches.

Zero bubble: a backward pass is split into one for inputs (I), which the previous stage needs, and one for weights (W).
No other rank waits for W, so W fills times in which its rank would wait.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from hpctrain.base.even_parts import even_parts
from hpctrain.records.plan.schedule import Action, Schedule

V_SHAPED_SCHEDULES = ("zbv",)
"""Schedules with two stages on each rank, placed in a V: the first and the last stage share a rank (Qi et al. 2024,
section 6).
"""


@lru_cache(maxsize=4096)
def stage_ranks(schedule: str, pp: int, stages: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, by stage number.

    Stage s lies on rank s % pp. In a V (schedule zbv) it lies on rank s for s < pp, and on rank 2·pp − 1 − s for the
    others.

    Args:
        schedule: name of the schedule.
        pp: number of pipeline ranks.
        stages: number of stages in all.
    """
    if schedule in V_SHAPED_SCHEDULES:
        return tuple(stage if stage < pp else 2 * pp - 1 - stage for stage in range(stages))
    return tuple(stage % pp for stage in range(stages))


@lru_cache(maxsize=4096)
def stages_by_rank(schedule: str, pp: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each pipeline rank, by rank; the stages of a rank are in ascending order.

    Args:
        schedule: name of the schedule.
        pp: number of pipeline ranks.
        stages: number of stages in all.
    """
    ranks = stage_ranks(schedule, pp, stages)
    return tuple(tuple(stage for stage in range(stages) if ranks[stage] == rank) for rank in range(pp))


def interleaved(pp: int, stages: int, micro_batches: int, split: bool) -> Schedule:
    """Return the table of interleaved 1F1B; with split backwards, of ZB-H1 (Qi et al. 2024) on interleaved stages.

    Args:
        pp: number of pipeline ranks.
        stages: number of stages in all, a multiple of `pp`.
        micro_batches: number of micro-batches.
        split: whether each backward is split in two: one for inputs (I), and one for weights (W) that pipeline rank r
            computes r backwards later.
    """
    return Schedule(tuple(_row(rank, pp, stages // pp, micro_batches, split) for rank in range(pp)))


def _row(rank: int, pp: int, chunks: int, micro_batches: int, split: bool) -> tuple[Action, ...]:
    """Return the actions of one rank in interleaved 1F1B, in order. The rank's stages are rank, rank + pp, rank + 2·pp,
    ...

    Args:
        rank: pipeline rank.
        pp: number of pipeline ranks.
        chunks: number of stages on the rank.
        micro_batches: number of micro-batches.
        split: whether backwards are split into I and W, as in interleaved_zero_bubble.
    """
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
    """Return the number of warm-up forwards of a rank in interleaved 1F1B: those before forwards and backwards
    alternate.

    A rank has two warm-up forwards more than the next rank, so that gradients arrive without a wait; with split
    backwards, one more is enough.

    Args:
        rank: pipeline rank.
        pp: number of pipeline ranks.
        chunks: number of stages on the rank.
        micro_batches: number of micro-batches.
        split: whether backwards are split into I and W, as in interleaved_zero_bubble.
    """
    spacing = 1 if split else 2
    return min((chunks - 1) * _rounds(pp, micro_batches)[0] + spacing * (pp - 1 - rank), chunks * micro_batches)


def visit_order(pp: int, chunks: int, micro_batches: int) -> list[tuple[int, int]]:
    """Return the order of a pipeline rank's forwards as (chunk, micro-batch) pairs; a chunk is the index of a stage
    among the stages of the pipeline rank.

    The micro-batches are divided into rounds, each of at least `pp` micro-batches if there are so many. A round goes
    through all chunks, one after the other, before the next round begins.

    Args:
        pp: number of pipeline ranks.
        chunks: number of stages on the pipeline rank.
        micro_batches: number of micro-batches.
    """
    starts = [0, *accumulate(_rounds(pp, micro_batches))]
    return [
        (chunk, index) for start, stop in pairwise(starts) for chunk in range(chunks) for index in range(start, stop)
    ]


def _rounds(pp: int, micro_batches: int) -> tuple[int, ...]:
    """Return the number of micro-batches of each round of an interleaved schedule, in order: at least `pp` if there are
    so many. The first rounds may have one micro-batch more than the later ones.
    """
    return even_parts(micro_batches, max(1, micro_batches // pp))


def zbv(pp: int, micro_batches: int) -> Schedule:
    """Return the zero-bubble table in a V: rank r holds the stages r and 2·pp − 1 − r.

    The order of actions is that of torch's ZBV schedule (Qi et al. 2024, section 6).

    The pattern needs at least 2·pp − 1 micro-batches. With fewer, the table is made for 2·pp − 1 micro-batches, and the
    actions of the surplus micro-batches are left out.
    """
    unfolded = max(2 * pp - 1, micro_batches)
    rows = [_v_row(rank, pp, unfolded) for rank in range(pp)]
    return Schedule(tuple(tuple(action for action in row if action.micro_batch < micro_batches) for row in rows))


def _v_row(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """Return the actions of one rank in the schedule zbv: warm-up, steady state and cool-down."""
    down, back = _ActionCounter(rank), _ActionCounter(2 * pp - 1 - rank)
    row = [down.take("F") for _ in range(2 * (pp - rank) - 1)]
    for _ in range(rank):
        row += [back.take("F"), down.take("F")]
    for _ in range(pp - rank):
        row += [back.take("F"), back.take("I"), back.take("W")]
    while back.done["F"] < micro_batches:
        row += [down.take("F")] if down.done["F"] < micro_batches else []
        row += [down.take("I"), down.take("W"), back.take("F"), back.take("I"), back.take("W")]
    for _ in range(rank):
        row += [down.take("I"), back.take("I")]
    for _ in range(pp - rank):
        row += [down.take("I"), down.take("W")]
    row += [back.take("W") for _ in range(micro_batches - back.done["W"])]
    row += [down.take("W") for _ in range(micro_batches - down.done["W"])]
    return row


class _ActionCounter:
    """Makes the actions of a stage in a schedule with split backwards: the n-th action of a kind (F, I, W) is that of
    micro-batch n − 1."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.done = {"F": 0, "I": 0, "W": 0}

    def take(self, kind: str) -> Action:
        self.done[kind] += 1
        return Action(self._stage, kind, self.done[kind] - 1)


SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
"""Schedules that `make_schedule` can make by name."""
SPLIT_BACKWARD_SCHEDULES = ("interleaved_zero_bubble", "zbv")
"""Schedules that split each backward pass into one for inputs (I) and one for weights (W)."""


@lru_cache(maxsize=16)
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
    """Return the actions of a stage in gpipe or 1f1b: `warmup` forwards, then backwards and forwards in turns until no
    forward remains, then the remaining backwards.
    """
    actions = [Action(stage, "F", index) for index in range(warmup)]
    for index in range(micro_batches):
        actions.append(Action(stage, "B", index))
        if warmup + index < micro_batches:
            actions.append(Action(stage, "F", warmup + index))
    return tuple(actions)
