"""A new plan for the remaining nodes of a run."""

from __future__ import annotations

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.planner.make import PlanRequest, make_plan
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.run import AutoParallel, Run
from hpctrain.records.topology.topology import Topology


def replan(
    run: Run,
    spec: Spec,
    remaining: Topology,
    lost: int,
    previous: Plan | None = None,
    profile: CalibrationProfile | None = None,
) -> tuple[Plan, str]:
    """Return the plan for a run after nodes were lost, and a remark on it.

    Degrees that the run file fixes are dropped if the remaining nodes do not allow them. They were chosen for the
    requested nodes, and it matters more that the run continues.

    Args:
        remaining: the topology of the remaining nodes.
        lost: number of lost nodes.
        previous: the plan that ran on all nodes; as much of its state as possible stays on its device.
        profile: factors on the cost model's constants from measured steps.

    Raises:
        RefusedError: the model does not fit on the remaining nodes.
        InputError: the run file or the topology cannot be planned for.
    """
    run = with_fewer_spares(run, lost)
    # The run stands still during this search, so rejected neighbours are left to `hpctrain plan --previous`.
    request = PlanRequest(neighbours=False)

    def make(run: Run) -> Plan:
        return make_plan(run, spec, remaining, request, previous=previous, profile=profile)

    try:
        return make(run), ""
    except (InputError, RefusedError) as error:
        if run.parallel.mode != "fixed":
            raise
        anyhow = run.model_copy(update={"parallel": AutoParallel()})
        return make(anyhow), f"without parallel.mode fixed: {error}"


def with_fewer_spares(run: Run, lost: int) -> Run:
    """The run with one spare fewer for each lost node, because spares replace lost nodes."""
    recovery = run.recovery.model_copy(update={"spares": max(0, run.recovery.spares - lost)})
    return run.model_copy(update={"recovery": recovery})
