"""The paper's configuration in docs/examples: it is valid, and the solver `paper` plans it."""

from __future__ import annotations

from pathlib import Path

from hpctrain.planner.make import PlanRequest, make_plan
from hpctrain.records.run.run import read_run
from hpctrain.records.topology.topology import Topology


def test_the_papers_configuration_is_planned_by_its_rules(repository: Path) -> None:
    run = read_run(repository / "docs/examples/paper/run.yaml")
    run = run.with_spec(run.spec().model_copy(update={"vocab": 32000}))
    topology = Topology.read(repository / "topology" / "paper-32-gpu.json")
    plan = make_plan(run, run.spec(), topology, PlanRequest(solver="paper"))
    assert plan.solver == "paper"
    assert {stop - start for start, stop in (stage.layers for stage in plan.stages)} <= {4, 5, 6}
    assert plan.replicas[0].micro_batches in (2, 4, 8, 16)
    assert plan.codec == run.compression
    said = " ".join(plan.notes)
    assert all(f"quation ({number})" in said for number in (1, 6, 7))
