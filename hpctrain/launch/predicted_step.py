"""The predicted step of a run's plan, rank by rank, for a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.launch.preflight.prepare import with_model_sizes
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.simulate.predict import SimulatedStep, simulate_step
from hpctrain.records.history.run_log import read_events
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import run_of
from hpctrain.records.topology.topology import Topology
from hpctrain.report.step_trace import PredictedSpan


def predicted_spans(folder: Path, generation: int) -> list[PredictedSpan]:
    """Return the spans of the step that the planner predicts for the plan of a generation.

    Args:
        folder: the run folder.

    Raises:
        FileError: a file of the run is missing or has errors.
        UntrustedError: a file of the run belongs to somebody else, or others can write to it.
        InputError: the plan cannot be predicted on the run's topology.
        HpctrainError: the process that builds the model failed.
    """
    events = read_events(folder / "events.jsonl")
    started = [event for event in events if event.kind == "generation_started" and event.generation == generation]
    if not started:
        raise InputError(f"{folder}: events.jsonl does not say which plan generation {generation} had")
    plan = Plan.read(folder / str(started[-1].data["plan"]), owned=True)
    topology = Topology.read(folder / "topology.json", owned=True)
    run, spec = with_model_sizes(run_of(folder), SystemRunner())
    scene = layout_of_plan(run, spec, plan, topology)
    return list(_spans(plan, simulate_step(scene.cost, scene.layout)))


def _spans(plan: Plan, step: SimulatedStep) -> Iterator[PredictedSpan]:
    """Yield the actions of each rank, the sum over replicas and the update. All ranks of a tensor-parallel group do the
    same."""
    done_s = max(step.all_reduced_at(pipeline_rank) for pipeline_rank in range(plan.pp))
    names = {"F": "forward", "B": "backward", "I": "backward for inputs,", "W": "backward for weights,"}
    for pipeline_rank, column in enumerate(plan.mesh()):
        end_s = step.all_reduced_at(pipeline_rank)
        for replica, row in enumerate(column):
            for rank in row:
                for action, start, end in step.lines[replica].spans[pipeline_rank]:
                    name = f"{names[action.kind]} stage {action.stage} mb {action.micro_batch}"
                    yield PredictedSpan(rank, name, start, end, "compute")
                if step.sums[pipeline_rank]:
                    yield PredictedSpan(rank, "reduce dp", step.sum_starts[pipeline_rank], end_s, "dp")
                yield PredictedSpan(rank, "optimizer", done_s, done_s + step.update, "compute")
