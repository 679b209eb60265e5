"""Fast simulation of a replica: the same arithmetic as `simulate`, without a record of every action.

Long tables repeat themselves: after a few rounds, every two further rounds take equally long. The search therefore
simulates two short tables and extrapolates linearly. The plan that is written is simulated whole.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hpctrain.planner.simulate.engine import StageDurations
from hpctrain.schedule.generate import make_schedule

SIMULATED_ROUNDS = 3
"""Rounds of `pp` micro-batches after which a table is assumed to repeat itself."""
ROUND_BASED_SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules whose first rounds are longer if `pp` does not divide the micro-batches."""
PERIOD_ROUNDS = 2
"""Rounds of one period: some patterns repeat every second micro-batch, and two rounds hold an even number of them."""


class TimedAction(NamedTuple):
    """An action with what it waits for; earlier actions of its own rank are implied."""

    rank: int
    duration: int
    """Index into the durations: F of all stages, then B, I and W."""
    needs: int
    """Index of the action of another rank that it waits for, or -1."""
    lag: int
    """Index of the message that it waits for, into the sends, then the sends back."""
    sends: int
    """Index of the message that it sends itself, or -1."""


def fast_simulate(
    schedule: str, pp: int, stages: int, micro_batches: int, durations: StageDurations, whole: bool = False
) -> tuple[float, ...]:
    """Return the seconds from the start of the step until each pipeline rank ends its last action.

    Args:
        whole: simulate every action instead of extrapolating long tables.
    """
    rest = micro_batches % pp if schedule in ROUND_BASED_SCHEDULES else 0
    short = pp * (SIMULATED_ROUNDS + rest) + (rest if schedule in ROUND_BASED_SCHEDULES else micro_batches % pp)
    # What remains after the short table has to be a whole number of periods.
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
    """Seconds of a step with one pipeline rank, which never waits."""
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
    """The table's actions, sorted so that each comes after the actions that it waits for."""
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
