"""`hpctrain bench plan`: searches, what placement is worth, and a plan beside all plans."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hpctrain.base.errors import CommandTimeoutError
from hpctrain.base.process import CommandResult, SystemRunner
from hpctrain.bench.planner.annealing import annealed_pct
from hpctrain.bench.planner.placement import measure as measure_placement
from hpctrain.bench.planner.search import (
    CASES,
    MIXED_CASES,
    MixedCase,
    SearchCase,
    brute_force_gap_pct,
    figures_of,
    scene_of_case,
)
from hpctrain.cli.main import cli
from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.replan.replan import plan_without

pytestmark = pytest.mark.slow


def test_the_planner_finds_what_trying_everything_finds() -> None:
    assert brute_force_gap_pct() == pytest.approx(0.0, abs=1e-6)


def test_searches_and_plans_after_a_loss_are_shown(monkeypatch) -> None:
    run, topology = scene_of_case(SearchCase("equal", 32, "350M"))
    found = figures_of(run, topology)
    assert "lost" not in figures_of(run, topology.only(["node0"])), "nothing would be left"
    plan = make_plan(run, run.spec(), topology)
    after, _ = plan_without(run, run.spec(), topology, ("node2",), plan)
    sent = sum(move.layers[1] - move.layers[0] for move in after.moves)
    assert (found["lost"]["sent_blocks"], found["lost"]["held_blocks"]) == (sent, 24 * after.dp * after.tp)

    class Answers(SystemRunner):
        def run(self, argv, timeout_s=None, env=None) -> CommandResult:
            if argv[-1] == "equal-32-350M":
                return CommandResult(tuple(argv), 0, json.dumps(found), "")
            raise CommandTimeoutError("too long")

    monkeypatch.setattr("hpctrain.cli.bench.plan.SystemRunner", Answers)
    done = CliRunner().invoke(cli, ["bench", "plan", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["searches"] == {"equal-32-350M": found}
    (row,) = (line for line in done.stderr.splitlines() if "equal-32-350M" in line and "took longer" not in line)
    assert f"{sent} of {24 * after.dp * after.tp}" in row


def test_annealing_improves_a_plan_by_the_rules_of_the_paper_and_hardly_that_of_the_search() -> None:
    run, topology = scene_of_case(MIXED_CASES[-1])
    paper, auto = (
        annealed_pct(run, topology, make_plan(run, run.spec(), topology, PlanRequest(solver=solver)), evaluations=1000)
        for solver in ("paper", "auto")
    )
    assert 0 <= auto < 1 < paper


def test_unlike_devices_gain_by_placement_and_equal_ones_do_not() -> None:
    cases = [case for case in CASES if case.name in ("equal-32-350M", "paper-32-1.3B")]
    cases.append(MixedCase(16, kinds=4, gb_per_s=12.5, model="7B", rows=64, seq_len=2048, sizes=(4,)))
    equal, mixed, large = measure_placement(lambda said: None, cases, orders=3)["rows"]
    assert equal["shuffled_s"] == pytest.approx([equal["planned_s"]] * 3)
    assert mixed["planned_s"] < mixed["shuffled_s"][1] <= mixed["shuffled_s"][0] <= mixed["shuffled_s"][2]
    assert mixed["planned_s"] < mixed["listed_s"]
    assert large["fitting"] == 0, "even stages do not fit into the smaller GPUs"
    assert "listed_s" not in large
