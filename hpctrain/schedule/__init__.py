"""Pipeline schedules as data: made by name, checked, and resolved from a plan."""

from hpctrain.schedule.check import check_schedule
from hpctrain.schedule.generate import make_schedule
from hpctrain.schedule.placement import stage_ranks, stages_by_rank
from hpctrain.schedule.resolve import schedule_of

__all__ = ["check_schedule", "make_schedule", "schedule_of", "stage_ranks", "stages_by_rank"]
