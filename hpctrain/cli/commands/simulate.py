"""`hpctrain simulate PLAN.JSON`: the predicted timeline of a step, also with changed figures of nodes and links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from rich.table import Table

from hpctrain import __version__
from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_delta, format_seconds
from hpctrain.cli.commands.plan import failures
from hpctrain.cli.options.parameters import FILE, FiniteNumber, node_names, numbers_by_name, numbers_by_node, set_option
from hpctrain.cli.options.slurm_options import no_job_options
from hpctrain.cli.views.console import Console, table_console
from hpctrain.launch.preflight.prepare import with_model_sizes
from hpctrain.planner.layout.plan_conversion import CostedLayout, layout_of_plan
from hpctrain.planner.replan.replan import TopologyChanges, apply_changes, plan_without
from hpctrain.planner.simulate.jitter import LinkJitter, sample_step_times
from hpctrain.planner.simulate.predict import (
    STEP_TIME_TERMS,
    Prediction,
    SimulatedStep,
    largest_increase,
    predict,
    simulate_step,
)
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import RUN_FILE, Run, read_run, run_of
from hpctrain.records.topology.topology import Topology
from hpctrain.report.html.charts.spans import gantt_chart
from hpctrain.report.html.page import write_charts
from hpctrain.report.timeline import Bar, terminal_lines

WIDTH = 80
"""Columns of the timeline if it is not printed on a terminal."""


class _Simulated(NamedTuple):
    """A plan with its layout on a topology, its simulated step and its predicted time."""

    plan: Plan
    scene: CostedLayout
    step: SimulatedStep
    prediction: Prediction


class _PlanOrVerb(click.Group):
    """A click group whose first argument may be a plan file instead of a command; the command is then `step`."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = ["step", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_PlanOrVerb, subcommand_metavar="PLAN.JSON | failures [OPTIONS]", options_metavar="")
def simulate_command() -> None:
    """A plan's step, and what slower nodes or links, lost nodes, jitter or failures would do to it.

    \b
    hpctrain simulate PLAN.JSON --slow n3=0.5     the step before and after
    hpctrain simulate PLAN.JSON --help            all options
    hpctrain simulate failures --help             a month of failures on thousands of GPUs

    All figures are predictions by the planner's cost model; no training runs.
    """


simulate_command.add_command(failures)


@simulate_command.command("step")
@click.argument("plan_file", metavar="PLAN.JSON", type=FILE)
@click.option("--topology", "topology_file", type=FILE, help="Default: topology.json beside the plan.")
@no_job_options
@click.option("--run", "run_file", type=FILE, help="Run file of the plan. Default: run.yaml beside the plan.")
@set_option
@click.option("--slow", multiple=True, metavar="NODE=SPEED", help="A node at that part of its speed: n3=0.5.")
@click.option("--link", multiple=True, metavar="A:B=PART", help="A link at that part of its bandwidth: n1:n2=0.25.")
@click.option("--lose", metavar="NODES", help="Without these nodes: the plan that the agents would go on with.")
@click.option(
    "--jitter",
    type=FiniteNumber(0),
    metavar="PART",
    help="Draw steps whose actions vary by that much "
    "(standard deviation over mean: 0.1), and whose messages are as late as measured.",
)
@click.option("--draws", type=click.IntRange(10, 100_000), default=1000, help="Steps drawn.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Decides what is drawn.")
@click.option("--html", "html_file", type=FILE, help="Write the timeline as one HTML file.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on stdout.")
def step(
    plan_file: Path, topology_file: Path | None, run_file: Path | None, overrides: tuple[str, ...],
    slow: tuple[str, ...], link: tuple[str, ...], lose: str | None, jitter: float | None, draws: int, seed: int,
    html_file: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """The predicted timeline of a step of PLAN.JSON, and what slower nodes or links, lost nodes or jitter would do to
    it.

    \b
    Exit codes: 0 done, 2 a file is wrong or a node unknown, 4 no plan without the lost nodes.
    """
    plan = Plan.read(plan_file)
    run = read_run(run_file or plan_file.parent / RUN_FILE, overrides)
    if run_file is None and run.code is not None:
        run = run_of(plan_file.parent, overrides)  # measuring the model runs the code that the run file names
    run, spec = with_model_sizes(run, SystemRunner())
    topology = Topology.read(topology_file or plan_file.parent / "topology.json")
    changes = TopologyChanges(
        slow=numbers_by_node("--slow", slow),
        links={_ends(name): value for name, value in numbers_by_name("--link", link).items()},
        lost=tuple(node_names("--lose", lose)) if lose else (),
    )
    before = _simulated(run, spec, plan, topology)
    after, remarks = None, _remarks(before)
    now = topology
    if changes != TopologyChanges():
        now = apply_changes(topology, changes)
        other, remark = _plan_after(run, spec, plan, now, changes.lost)
        after = _simulated(run, spec, other, now)
        remarks += [remark] if remark else []
    shown = after or before
    drawn = None
    if jitter is not None:
        rng = np.random.default_rng(seed)
        late = LinkJitter(now)
        times = sample_step_times(shown.scene.cost, shown.scene.layout, late, draws, rng, jitter)
        p50, p95 = np.quantile(times, [0.5, 0.95]).tolist()
        drawn = {"steps": draws, "p50_s": p50, "p95_s": p95}
        remarks += [] if late else ["The topology has no spread of latencies: messages take what they always take."]
    people = table_console(as_json, WIDTH)
    _tell(people, before, after, drawn, remarks)
    if html_file is not None:
        _write_html(html_file, plan_file, before, after, remarks)
        people.print(f"wrote {html_file}", soft_wrap=True)
    if as_json:
        click.echo(json.dumps(_machine_form(before, after, drawn, remarks), indent=1))


def _ends(name: str) -> tuple[str, str]:
    a, colon, b = name.partition(":")
    if not colon or not a or not b:
        raise InputError(f"--link: found {name!r}; a link is between two nodes: a:b=0.25")
    return a, b


def _simulated(run: Run, spec: Spec, plan: Plan, topology: Topology) -> _Simulated:
    scene = layout_of_plan(run, spec, plan, topology)
    return _Simulated(
        plan, scene, simulate_step(scene.cost, scene.layout), predict(scene.cost, scene.layout, whole=True)
    )


def _plan_after(run: Run, spec: Spec, plan: Plan, topology: Topology, lost: tuple[str, ...]) -> tuple[Plan, str]:
    """Return the plan that the agents would go on with after the loss of the nodes `lost`, and a remark about it; ''
    without a remark.

    Args:
        topology: the changed topology.
    """
    if not lost:
        return plan, ""
    if not set(lost) & set(plan.nodes):
        return plan, "The plan does not use the lost nodes, so the agents would keep it."
    return plan_without(run, spec, topology, lost, plan)


def _remarks(simulated: _Simulated) -> list[str]:
    """Return a list with one line if the step time in the plan file differs by more than 1 % from the one predicted
    now; else []."""
    if simulated.plan.predicted is None:
        return []
    stated, total = simulated.plan.predicted.step_time_s.get("total", 0.0), simulated.prediction.total
    if abs(stated - total) <= 0.01 * total:
        return []
    return [
        f"The plan says {format_seconds(stated)}, these files give {format_seconds(total)}: it was edited, or made "
        "from others."
    ]


def _bars(simulated: _Simulated) -> list[Bar]:
    """Return the bars of the timeline, for the replica that ends last: its actions, the all-reduce over replicas and
    the optimizer's update."""
    line = simulated.step.lines[simulated.step.last]
    bars = [
        Bar(rank, action.kind, str(action), start, end)
        for rank, row in enumerate(line.spans)
        for action, start, end in row
    ]
    done = 0.0
    for rank in range(len(line.spans)):
        end = simulated.step.all_reduced_at(rank)
        done = max(done, end)
        if simulated.step.sums[rank]:
            # What passes during the rank's actions has no bar: it would hide them.
            bars.append(Bar(rank, "S", "sum over replicas", end - simulated.step.sums[rank], end))
    update = [
        Bar(rank, "U", "norm and optimizer", done, done + simulated.step.update) for rank in range(len(line.spans))
    ]
    return bars + update


def _heading(simulated: _Simulated) -> str:
    plan = simulated.plan
    return (
        f"{plan.dims}, {plan.schedule}, micro-batch {plan.replicas[0].micro_batch} on "
        f"{len(plan.nodes)} nodes: {format_seconds(simulated.prediction.total)} a step"
    )


def _early_sums(simulated: _Simulated) -> str | None:
    """Return a sentence about the sums that begin before the last backward; None if there are none."""
    early_s = simulated.step.early_sums_s
    if not early_s:
        return None
    return f"Sums over replicas begin {format_seconds(early_s)} before the last backward of their pipeline rank ends."


def _tell(
    people: Console, before: _Simulated, after: _Simulated | None, drawn: dict[str, Any] | None,
    remarks: list[str],
) -> None:  # fmt: skip
    for simulated in [before] if after is None else [before, after]:
        people.print(_heading(simulated), soft_wrap=True)
        total = simulated.prediction.total
        for line in terminal_lines(_bars(simulated), simulated.plan.pp, total, people.width):
            people.print(line, soft_wrap=True)
        if (sentence := _early_sums(simulated)) is not None:
            people.print(sentence, soft_wrap=True)
        people.print()
    if after is not None:
        people.print(_comparison(before, after))
        people.print(_verdict(before, after), soft_wrap=True)
    if drawn is not None:
        median, p95 = format_seconds(drawn["p50_s"]), format_seconds(drawn["p95_s"])
        people.print(f"{drawn['steps']} steps drawn: median {median}, p95 {p95}")
    for remark in remarks:
        people.print(f"note: {remark}", soft_wrap=True)


def _comparison(before: _Simulated, after: _Simulated) -> Table:
    table = Table("term", "before", "after", "change", title="Predicted time of a step")
    for term in (*STEP_TIME_TERMS, "total"):
        one, other = before.prediction.terms[term], after.prediction.terms[term]
        table.add_row(term, format_seconds(one), format_seconds(other), format_delta(other - one))
    return table


def _verdict(before: _Simulated, after: _Simulated) -> str:
    one, other = before.prediction, after.prediction
    if other.total <= one.total * (1 + 1e-9):
        return "No slower."
    return f"{other.total / one.total:.2f} times as long: {largest_increase(one.terms, other.terms)}."


def _write_html(
    target: Path, plan_file: Path, before: _Simulated, after: _Simulated | None, remarks: list[str]
) -> None:
    charts = [gantt_chart("before", _heading(before), _bars(before), before.plan.pp)]
    lines = list(remarks)
    if after is not None:
        charts.append(gantt_chart("after", f"After the change: {_heading(after)}", _bars(after), after.plan.pp))
        lines.insert(0, _verdict(before, after))
    footer = f"Predicted by hpctrain {__version__}; nothing here was measured."
    write_charts(target, plan_file.name, lines, charts, footer)


def _machine_form(
    before: _Simulated, after: _Simulated | None, drawn: dict[str, Any] | None, remarks: list[str]
) -> dict[str, Any]:
    form: dict[str, Any] = {"before": {"step_time_s": before.prediction.terms}, "notes": remarks}
    if after is not None:
        form["after"] = {"step_time_s": after.prediction.terms, "plan": after.plan.to_json()}
        form["blame"] = _verdict(before, after)
    if drawn is not None:
        form["drawn"] = drawn
    return form
