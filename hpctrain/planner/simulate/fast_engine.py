"""When the ranks of a replica are done, fast: the same arithmetic as `simulate`, without a record of every action.

Long tables repeat themselves. Beyond a few rounds each two further rounds take as long as the two before, so the search
looks at two short tables and goes on along the line through them; the plan that is written is worked out whole.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hpctrain.planner.simulate.engine import StageDurations
from hpctrain.schedule.generate import make_schedule

SIMULATED_ROUNDS = 3
"""Rounds of `pp` micro-batches after which a table is taken to repeat itself."""
ROUND_BASED_SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules whose first rounds are longer where the numbers do not divide."""
PERIOD_ROUNDS = 2
"""Rounds after which what repeats itself every second micro-batch does so, be `pp` even or odd."""


class TimedAction(NamedTuple):
    """An action, ready to be timed. What its own rank did before needs no waiting for."""

    rank: int
    duration: int
    """Index into the durations: F, B, I, W of stage 0, 1, …"""
    needs: int
    """Index of the step of another rank that it waits for, or -1."""
    lag: int
    """Index into the sends, then the sends back."""
    sends: int
    """Index of what it sends itself, or -1."""


def fast_simulate(
    schedule: str, pp: int, stages: int, micro_batches: int, durations: StageDurations, whole: bool = False
) -> tuple[float, ...]:
    """Seconds from the start of the step until each pipeline rank has done its last action.

    Args:
        whole: time every action, however many micro-batches there are.
    """
    rest = micro_batches % pp if schedule in ROUND_BASED_SCHEDULES else 0
    short = pp * (SIMULATED_ROUNDS + rest) + (rest if schedule in ROUND_BASED_SCHEDULES else micro_batches % pp)
    # Whole periods are left over, so that the line meets the table where they begin.
    short += (micro_batches - short) // pp % PERIOD_ROUNDS * pp
    if whole or pp == 1 or micro_batches <= short + PERIOD_ROUNDS * pp:
        if pp == 1:
            return (_single_rank_s(schedule, stages, micro_batches, durations),)
        return _run_program(_program(schedule, pp, stages, micro_batches), pp, durations)
    first = _run_program(_program(schedule, pp, stages, short), pp, durations)
    second = _run_program(_program(schedule, pp, stages, short + PERIOD_ROUNDS * pp), pp, durations)
    periods = (micro_batches - short) / (PERIOD_ROUNDS * pp)
    return tuple(a + periods * (b - a) for a, b in zip(first, second, strict=True))


def _single_rank_s(schedule: str, stages: int, micro_batches: int, durations: StageDurations) -> float:
    """One rank waits for nobody."""
    kinds = {action.kind for action in make_schedule(schedule, 1, stages, 1).ranks[0]}
    by_kind = {"F": durations.forward, "B": durations.backward, "I": durations.inputs, "W": durations.weights}
    return micro_batches * sum(sum(by_kind[kind]) for kind in kinds)


def _run_program(program: tuple[TimedAction, ...], pp: int, durations: StageDurations) -> tuple[float, ...]:
    by_action = [*durations.forward, *durations.backward, *durations.inputs, *durations.weights]
    lags = [*durations.send, *durations.send_back]
    free, last, ends = [0.0] * pp, [0.0] * pp, [0.0] * len(program)
    for index, (rank, duration, needs, lag, sends) in enumerate(program):
        start = free[rank]
        if needs >= 0:
            arrived = ends[needs] + lags[lag]
            if arrived > start:
                start = arrived
        end = start + by_action[duration]
        ends[index] = last[rank] = free[rank] = end
        if durations.blocking and sends >= 0:
            free[rank] += lags[sends]
    return tuple(last)


@lru_cache(maxsize=1024)
def _program(schedule: str, pp: int, stages: int, micro_batches: int) -> tuple[TimedAction, ...]:
    """The table's actions in an order in which each comes after what it waits for."""
    rows = make_schedule(schedule, pp, stages, micro_batches).ranks
    place: dict[tuple[int, str, int], int] = {}
    program: list[TimedAction] = []
    position = [0] * pp
    left = sum(map(len, rows))
    while left:
        before = left
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                stage, kind, micro_batch = row[position[rank]]
                other = {"F": stage - 1, "W": stages}.get(kind, stage + 1)
                way = "F" if kind == "F" else "B"
                needs = -1
                if 0 <= other < stages:
                    needs = place.get((other, way, micro_batch), -2)
                    if needs == -2:
                        break
                lag = other if kind == "F" else stages - 1 + stage
                sends = -1
                if kind == "F" and stage < stages - 1:
                    sends = stage
                elif kind in "BI" and stage > 0:
                    sends = stages - 1 + stage - 1
                place[stage, "B" if kind == "I" else kind, micro_batch] = len(program)
                program.append(TimedAction(rank, "FBIW".index(kind) * stages + stage, needs, lag, sends))
                position[rank] += 1
                left -= 1
        if left == before:
            raise ValueError("the action table cannot be executed: every pipeline rank waits for another")
    return tuple(program)
