"""Zero-bubble schedules (Qi et al. 2024): the backward for weights fills times in which a rank would wait.

A backward pass is split into one for inputs (I), which the previous stage needs, and one for weights (W), which no
other rank waits for. `interleaved_zero_bubble` is their ZB-H1 on interleaved stages, `zbv` their section 6, both in the
order of torch's own schedules.
"""

from __future__ import annotations

from hpctrain.records.plan.schedule import Action, Schedule
from hpctrain.schedule.rounds import interleave


def interleaved_zero_bubble(pp: int, stages: int, micro_batches: int) -> Schedule:
    """Interleaved 1F1B with split backwards; on rank r, W lags r backwards behind I."""
    rows = []
    for rank in range(pp):
        turns = interleave(rank, pp, stages, micro_batches, spacing=1)
        row = list(turns.warmup)
        backwards = [backward for _, backward in turns.pairs]
        for turn, (forward, (stage, index)) in enumerate(turns.pairs):
            row += [forward] if forward else []
            row.append(Action(stage, "I", index))
            if turn >= rank:
                late_stage, late_index = backwards[turn - rank]
                row.append(Action(late_stage, "W", late_index))
        row += [Action(stage, "W", index) for stage, index in backwards[max(0, len(backwards) - rank) :]]
        rows.append(tuple(row))
    return Schedule(tuple(rows))


def zbv(pp: int, micro_batches: int) -> Schedule:
    """The table with two stages a rank in a V: rank r holds stage r and, on the way back, stage 2·pp − 1 − r.

    The pattern needs at least 2·pp − 1 micro-batches. With fewer, the table is made for that many and the surplus is
    left out, which keeps the order of the others.
    """
    unfolded = max(2 * pp - 1, micro_batches)
    rows = [_v_row(rank, pp, unfolded) for rank in range(pp)]
    return Schedule(tuple(tuple(action for action in row if action.micro_batch < micro_batches) for row in rows))


def _v_row(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """Warm-up, steady state and cool-down of one rank."""
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
    """Makes the actions of a stage, each kind in order of its micro-batches."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.done = {"F": 0, "I": 0, "W": 0}

    def take(self, kind: str) -> Action:
        self.done[kind] += 1
        return Action(self._stage, kind, self.done[kind] - 1)
