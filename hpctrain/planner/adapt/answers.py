"""The plans that a run may take when its devices have other speeds than planned, the one that changes least of its
present plan first."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from hpctrain.base.errors import HpctrainError
from hpctrain.planner.layout.partition import with_micro_batches_by_speed
from hpctrain.planner.layout.plan_conversion import CostedLayout, plan_of_layout
from hpctrain.planner.make import PlanRequest, make_plan
from hpctrain.planner.replan.replan import replan
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.prediction import Predicted
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.recovery import Recovery
from hpctrain.records.run.run import FixedParallel, Run
from hpctrain.records.topology.topology import Topology
from hpctrain.schedule.generate import why_no_schedule


def possible_answers(
    run: Run, spec: Spec, topology: Topology, lost: int, scene: CostedLayout, present: Plan,
    profile: CalibrationProfile | None, layers: tuple[LayerFigures, ...],
) -> list[Plan]:  # fmt: skip
    """Return the plans that a run may take in place of the present one, the one that changes least of it first.

    They are: the present plan with other numbers of micro-batches; the same degrees on the same nodes with other cuts,
    devices and micro-batches; the same degrees on all living nodes, spares included; one replica fewer on these nodes;
    and the plan of a search without these limits (`replan`). The third and the fourth are left out if the run file
    fixes the degrees. Plans that cannot be made are left out, except the last one. If the present plan is one of the
    solver paper, the only plan is a new one of this solver.

    Args:
        topology: the nodes that live, with the measured speeds.
        lost: number of nodes that the run has lost.
        scene: the present plan's layout on the topology.
        present: the plan that runs.
        profile: factors on the cost model's constants from measured steps; None: no factors.
        layers: what was measured of the layers, over all ranks; all plans but the first one choose a codec by it.

    Raises:
        RefusedError, InputError: as for `replan`; for the solver paper, as for `make_plan`.
    """
    request = PlanRequest(neighbours=False, layers=layers)
    if present.solver == "paper":
        # The paper decides once more after the warm-up, by the same rules.
        request = replace(request, solver="paper")
        return [make_plan(run, spec, topology, request, previous=present, profile=profile)]
    plans = []
    layout = with_micro_batches_by_speed(scene.cost, scene.layout)
    counts = set(layout.micro_batches)
    if layout.memory_shortage(scene.cost.memory) is None and not any(
        why_no_schedule(present.schedule, present.pp, len(present.stages), count) for count in counts
    ):
        terms = predict(scene.cost, layout, whole=True).terms
        plan = plan_of_layout(
            layout, scene.cost, run_sha256=present.run_sha256, topology_sha256=topology.sha256(), profile=profile,
            solver=present.solver, compression=present.compression,
            predicted=Predicted(step_time_s=terms, memory_bytes=layout.memory(scene.cost.memory)),
        )  # fmt: skip
        plans.append(plan)
    same = _same_degrees(run, present)
    places = [(topology.only(present.nodes), same)]
    if run.parallel.mode != "fixed":
        places += [(topology, same)] * (len(topology.nodes) > len(present.nodes))
        places += [(topology, same.model_copy(update={"dp": present.dp - 1}))] * (present.dp > 1)
    for nodes, parallel in places:
        fixed = run.model_copy(update={"parallel": parallel, "recovery": Recovery()})
        with contextlib.suppress(HpctrainError):  # the search for any plan says why there is none
            plan = make_plan(fixed, spec, nodes, request, previous=present, profile=profile)
            plans.append(plan.model_copy(update={"run_sha256": run.sha256()}))
    return [*plans, replan(run, spec, topology, lost, present, profile, layers)[0]]


def _same_degrees(run: Run, plan: Plan) -> FixedParallel:
    """Return the degrees that the run file fixes, or else those of a plan, with its schedule and memory options."""
    if run.parallel.mode == "fixed":
        return run.parallel
    values = {name: getattr(plan, name) for name in ("pp", "dp", "tp", "zero", "sequence_parallel")}
    values["schedule"] = plan.schedule if plan.pp > 1 and plan.schedule != "custom" else None
    values["shard"] = "all" if plan.shard is None else "node"
    return FixedParallel(mode="fixed", recompute=plan.stages[0].recompute, **values)
