"""The plan for the nodes that a run has left."""

from __future__ import annotations

from functools import partial

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.planner.make import make_plan
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.run import AutoParallel, Run
from hpctrain.records.topology.topology import Topology


def replan(
    run: Run,
    spec: Spec,
    left: Topology,
    lost: int,
    previous: Plan | None = None,
    profile: CalibrationProfile | None = None,
) -> tuple[Plan, str]:
    """The plan that goes on after a loss, and a remark on it.

    Degrees by hand are dropped where they cannot be kept: they were chosen for the nodes that were asked for, and going
    on matters more than keeping them.

    Args:
        left: the nodes that are left.
        lost: how many are gone.
        previous: the plan that ran on all of them, of which as much state as can be stays where it is.
        profile: what steps that were really made say of the constants.

    Raises:
        RefusedError: the model does not fit on them.
        InputError: the run file or the topology cannot be planned for.
    """
    run = with_fewer_spares(run, lost)
    # A run stands still meanwhile: its neighbours are for those who ask `hpctrain plan --previous`.
    make = partial(make_plan, spec=spec, topology=left, previous=previous, profile=profile, neighbours=False)
    try:
        return make(run), ""
    except (InputError, RefusedError) as error:
        if run.parallel.mode != "fixed":
            raise
        anyhow = run.model_copy(update={"parallel": AutoParallel()})
        return make(anyhow), f"without parallel.mode fixed: {error}"


def with_fewer_spares(run: Run, lost: int) -> Run:
    """The run with a spare less for each node that is gone: they were kept for this."""
    recovery = run.recovery.model_copy(update={"spares": max(0, run.recovery.spares - lost)})
    return run.model_copy(update={"recovery": recovery})
