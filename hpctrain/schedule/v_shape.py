"""The zero-bubble schedule in a V (Qi et al. 2024, section 6), with the order of actions of torch's ZBV schedule.

A backward pass is split into one for inputs (I), which the previous stage needs, and one for weights (W). No other rank
waits for W, so it fills times in which a rank would wait.
"""

from __future__ import annotations

from hpctrain.records.plan.schedule import Action, Schedule


def zbv(pp: int, micro_batches: int) -> Schedule:
    """Return the table with two stages a rank in a V: rank r holds stage r and, on the way back, stage 2·pp − 1 − r.

    The pattern needs at least 2·pp − 1 micro-batches. With fewer, the table is made for 2·pp − 1 micro-batches and the
    surplus ones are left out; the order of the others stays.
    """
    unfolded = max(2 * pp - 1, micro_batches)
    rows = [_v_row(rank, pp, unfolded) for rank in range(pp)]
    return Schedule(tuple(tuple(action for action in row if action.micro_batch < micro_batches) for row in rows))


def _v_row(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """Return the warm-up, steady state and cool-down of one rank."""
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
    """Makes the actions of a stage; actions of each kind count up through the micro-batches."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.done = {"F": 0, "I": 0, "W": 0}

    def take(self, kind: str) -> Action:
        self.done[kind] += 1
        return Action(self._stage, kind, self.done[kind] - 1)
