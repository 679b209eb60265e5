"""The named pipeline schedules as tables of compute actions.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-flush). Interleaved 1F1B: Narayanan et al. 2021,
section 2.2, with rounds that need not be as long as the pipeline, as torch runs it.
"""

from __future__ import annotations

from functools import lru_cache

from hpctrain.records.schedule import Action, Schedule

NAMES = ("gpipe", "1f1b", "interleaved_1f1b")
"""Schedules that can be made by name."""


@lru_cache(maxsize=4096)
def make_schedule(name: str, pp: int, stages: int, micro_batches: int) -> Schedule:
    """The action table of a named schedule; stage s lies on pipeline rank s % pp.

    Args:
        pp: pipeline ranks.
        stages: stages in all; `pp` of them for gpipe and 1f1b, a larger multiple of it for interleaved_1f1b.
        micro_batches: any number from 1 on; with fewer than `pp`, 1f1b has fewer warm-up forwards.

    Raises:
        ValueError: the schedule is unknown or not defined for these numbers.
    """
    if pp < 1 or micro_batches < 1:
        raise ValueError(f"pp {pp} and micro_batches {micro_batches}: both start at 1")
    if name == "interleaved_1f1b":
        return _interleaved(pp, stages, micro_batches)
    if name not in NAMES:
        raise ValueError(f"schedule: found {name!r}, allowed: {', '.join(NAMES)}")
    if stages != pp:
        raise ValueError(f"schedule {name}: found {stages} stages on {pp} pipeline ranks, allowed: one stage a rank")
    warmups = [micro_batches if name == "gpipe" else min(micro_batches, pp - rank) for rank in range(pp)]
    return Schedule(tuple(_fill_drain(rank, warmup, micro_batches) for rank, warmup in enumerate(warmups)))


def interleaves(pp: int, stages: int, micro_batches: int) -> str | None:
    """None when interleaved 1F1B is defined for these numbers, else the reason why not, as one clause."""
    if stages % pp or stages < 2 * pp:
        return f"found {stages} stages on {pp} pipeline ranks, allowed: at least two stages a rank, as many on each"
    rounds = max(1, micro_batches // pp)
    if micro_batches % rounds:
        return f"{micro_batches} micro-batches are not a multiple of its {rounds} rounds"
    return None


def _fill_drain(stage: int, warmup: int, micro_batches: int) -> tuple[Action, ...]:
    """`warmup` forwards, then backward and forward in turns, then the backwards that are left."""
    actions = [Action(stage, "F", index) for index in range(warmup)]
    for index in range(micro_batches):
        actions.append(Action(stage, "B", index))
        if warmup + index < micro_batches:
            actions.append(Action(stage, "F", warmup + index))
    return tuple(actions)


def _interleaved(pp: int, stages: int, micro_batches: int) -> Schedule:
    reason = interleaves(pp, stages, micro_batches)
    if reason:
        raise ValueError(f"schedule interleaved_1f1b: {reason}")
    chunks = stages // pp
    length = micro_batches // max(1, micro_batches // pp)
    forwards = _visits(chunks, length, micro_batches)
    backwards = [(chunks - 1 - chunk, index) for chunk, index in forwards]
    rows = []
    for rank in range(pp):
        warmup = min((chunks - 1) * length + 2 * (pp - 1 - rank), len(forwards))
        row = [Action(chunk * pp + rank, "F", index) for chunk, index in forwards[:warmup]]
        for turn, (chunk, index) in enumerate(backwards):
            if warmup + turn < len(forwards):
                ahead, ahead_index = forwards[warmup + turn]
                row.append(Action(ahead * pp + rank, "F", ahead_index))
            row.append(Action(chunk * pp + rank, "B", index))
        rows.append(tuple(row))
    return Schedule(tuple(rows))


def _visits(chunks: int, length: int, micro_batches: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order a rank works on them: `length` micro-batches through every chunk in turn."""
    starts = range(0, micro_batches, length)
    return [(chunk, index) for start in starts for chunk in range(chunks) for index in range(start, start + length)]
