"""Finds the action table that a replica runs: the plan's table if it is complete, else that of the named schedule."""

from __future__ import annotations

from hpctrain.base.errors import InputError
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.schedule import Schedule
from hpctrain.schedule.check import check_schedule
from hpctrain.schedule.generate import SCHEDULE_NAMES, make_schedule


def schedule_of(plan: Plan, replica: int) -> tuple[Schedule, str | None]:
    """Return the action table of a replica, and a note for the user if it is not the one stated in the plan.

    If you edit micro-batches or stages by hand, you need not rewrite the table of a named schedule: it is made again.

    Raises:
        InputError: the schedule is 'custom' and its table is incomplete, or the named schedule is not defined for the
            plan.
    """
    where = f"plan: actions[{replica}]"
    stages, micro_batches = len(plan.stages), plan.replicas[replica].micro_batches
    try:
        table = plan.table(replica)
        if table is None:
            problem = "no table is given"
        else:
            check_schedule(table, stages, micro_batches)
            _check_placed(table, plan)
            return table, None
    except ValueError as error:
        problem = str(error)
    if plan.schedule == "custom":
        raise InputError(f"{where}: {problem}; complete the table, or name a schedule: {', '.join(SCHEDULE_NAMES)}")
    try:
        made = make_schedule(plan.schedule, plan.pp, stages, micro_batches)
        _check_placed(made, plan)
    except ValueError as error:
        raise InputError(f"plan: {error}; change `schedule`, the stages, their devices or the micro-batches") from None
    if replica not in plan.actions:
        return made, None
    note = (
        f"The actions of replica {replica} do not cover its {micro_batches} micro-batches on {stages} stages "
        f"({problem}), so the {plan.schedule} table was made for them."
    )
    return made, note


def _check_placed(table: Schedule, plan: Plan) -> None:
    """Check that each stage runs on the pipeline rank that the plan's `devices` say.

    Raises:
        ValueError: a stage runs on another rank; the message names the first such stage.
    """
    owner = plan.stage_owner()
    for stage, rank in table.owner().items():
        if owner[stage] != rank:
            raise ValueError(f"stage {stage} is on pipeline rank {rank}, its devices are those of rank {owner[stage]}")
