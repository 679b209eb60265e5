"""What a run asks of a plan that the plan alone cannot tell to be wrong."""

from __future__ import annotations

from hpctrain.base.errors import InputError
from hpctrain.records.plan import Plan
from hpctrain.records.run import Run
from hpctrain.schedule.resolve import schedule_of


def check_runnable(plan: Plan, run: Run) -> None:
    """Pass silently when the plan can be executed for this run.

    Raises:
        InputError: with the first reason why not, as one line.
    """
    if plan.sequence_parallel and run.data.seq_len % plan.tp:
        raise InputError(
            f"data.seq_len: found {run.data.seq_len}; with sequence_parallel it is a multiple of tp {plan.tp}; change it, "
            "or switch sequence_parallel off"
        )
    if run.compile and (split := _split_backward(plan)):
        raise InputError(
            f"compile: found true with the action {split}; a compiled block cannot cut its backward in two (I, W); switch "
            "compile off, or use schedule 1f1b"
        )


def _split_backward(plan: Plan) -> str | None:
    """An action of the plan that is one half of a backward, or None."""
    for replica in range(plan.dp):
        table, _ = schedule_of(plan, replica)
        for row in table.ranks:
            for action in row:
                if action.kind in "IW":
                    return str(action)
    return None
