"""A run on a lab whose plan may change (`AdaptingJob`), and what its rows and events say about it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain.bench.recovery.lab_jobs import HpctrainJob, LabSite
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.replan.replan import TopologyChanges, apply_changes, replan
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.history.run_log import Event, MetricRow, read_events, read_metrics
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import run_of
from hpctrain.records.topology.topology import Topology

WINDOW = 10
"""Steps over which a throughput is taken, by wall time. The time that a change of the plan takes is included."""
GOAL = 0.9
"""Share of the predicted throughput at which a run counts as adapted."""


class AdaptingJob(HpctrainJob):
    """A run on all nodes of a site, with a plan of the planner at the beginning."""

    def __init__(self, site: LabSite, number: int, topology: Path, **keys: Any) -> None:
        """Begin without a run.

        Args:
            topology: topology file of the site's nodes.
            keys: keys of the run file besides those of `HpctrainJob`, such as adapt, parallel and seed.
        """
        super().__init__(site, number, {})
        self._topology, self._keys = topology, keys

    def start(self) -> None:
        self._make_run(**self._keys)
        self._submit(self._topology)

    def rows(self) -> list[MetricRow]:
        """Return the rows of metrics.jsonl so far, in order."""
        return read_metrics(self._folder() / "metrics.jsonl")

    def events(self, kind: str) -> list[Event]:
        """Return the events of a kind so far, in order."""
        return [event for event in read_events(self._folder() / "events.jsonl") if event.kind == kind]

    def predicted_ratio(self, changes: TopologyChanges) -> float:
        """Return the predicted seconds of a step with the best plan for changed nodes and links, divided by those of
        the present plan without the changes.

        Raises:
            HpctrainError: the planner cannot make or predict a plan.
        """
        folder = self._folder()
        run, topology = run_of(folder), Topology.read(folder / "topology.json")
        plans = sorted(folder.glob("plan*.json"), key=lambda path: (len(path.name), path.name))
        present = Plan.read(plans[-1])
        scene = layout_of_plan(run, run.spec(), present, topology)
        best, _ = replan(run, run.spec(), apply_changes(topology, changes), 0, present)
        assert best.predicted is not None, "the planner predicts its plans"
        return best.predicted.step_time_s["total"] / predict(scene.cost, scene.layout, whole=True).total

    def _folder(self) -> Path:
        assert self._run is not None, "it was started"
        return self._run


def usual_step_s(rows: Sequence[MetricRow]) -> float:
    """Return the median seconds of a step, as the time between the ends of two steps of one generation. Of at least
    one generation, `rows` has two rows or more."""
    return median(b.time_s - a.time_s for a, b in pairwise(rows) if a.generation == b.generation)


def reached_s(rows: Sequence[MetricRow], since_s: float, goal_s: float) -> float | None:
    """Return the seconds from `since_s` until the last `WINDOW` steps took `goal_s` a step or less; None if they never
    did.

    Args:
        since_s: seconds since 1970. Steps that ended before do not count.
        goal_s: seconds of a step.
    """
    ends = [row.time_s for row in rows if row.time_s > since_s]
    for first, last in zip(ends, ends[WINDOW:], strict=False):
        if last - first <= WINDOW * goal_s:
            return last - since_s
    return None
