"""`hpctrain plan`: make a plan from a run file and a topology, with its reasons.

Also `hpctrain simulate failures`: goodput of a long job by checkpoint interval and kind of recovery.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click
from rich.table import Table

from hpctrain.base.errors import FileError, InputError, RefusedError
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_count, format_seconds
from hpctrain.cli.answers import warn
from hpctrain.cli.options.completion import complete_runs
from hpctrain.cli.options.given_topology import errors_name_file, nodelist_option, select_nodes, warn_if_stale
from hpctrain.cli.options.parameters import FILE, PATH, FiniteNumber, node_names, numbers_by_name, set_option
from hpctrain.cli.options.slurm_options import no_job_options
from hpctrain.cli.views.console import table_console
from hpctrain.cli.views.plan_explanation import explanation
from hpctrain.hf.folder import hf_warnings
from hpctrain.launch.preflight.checks import MAX_AGE_DAYS
from hpctrain.launch.preflight.prepare import with_model_sizes
from hpctrain.planner import PlanRequest, Solver, make_plan
from hpctrain.planner.cost.workload import USABLE_MEMORY_SHARE
from hpctrain.planner.devices.power import probed_watts, run_watts
from hpctrain.planner.explain import extra_neighbours, idle_devices
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.replan.calibration import learned_profile
from hpctrain.planner.search.objective import Goal, GoodputConstraint, Objective
from hpctrain.planner.simulate.goodput import (
    DEFAULT_RECOVERY_S,
    RECOVERY_MODES,
    FailureModel,
    Goodput,
    RecoveryMode,
    daly_goodput,
    daly_interval,
    simulate_goodput,
)
from hpctrain.records.format.node_name import compress_node_set
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.options_text import memory_options_text
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.run import read_run, run_of
from hpctrain.records.topology.topology import Topology
from hpctrain.report.html.tables.words import plural
from hpctrain.runs.locate import find_run


def recover_option(purpose: str = "") -> Callable[..., Any]:
    """Return the decorator that gives a command the option `--recover SECONDS`.

    Args:
        purpose: what the command needs the option for, as the end of a phrase in the help text: ", for --min-goodput".
    """
    return click.option(
        "--recover",
        type=FiniteNumber(0),
        default=DEFAULT_RECOVERY_S,
        metavar="SECONDS",
        help=f"From a failure to the next step, in place{purpose} (default: 5 s until a silent node is missed, and "
        "what four local nodes took).",
    )


@click.command("plan")
@click.argument("run_file", metavar="RUN.YAML", type=PATH)
@click.option(
    "--topology", "topology_file", required=True, type=PATH, help="Topology file, as `hpctrain probe` writes it."
)
@no_job_options
@click.option("-o", "--output", type=FILE, default=Path("plan.json"), help="File to write.")
@click.option(
    "--solver",
    type=click.Choice(["auto", "exact", "paper"]),
    default="auto",
    help="auto: the fastest by the cost model; exact: compares every plan on up to 8 devices; "
    "paper: the paper's equations (1) and (7).",
)
@click.option("--previous", type=PATH, help="Plan that this one replaces: state stays in place as far as possible.")
@click.option(
    "--calibrate-from",
    "profiled",
    metavar="RUN",
    shell_complete=complete_runs,
    help="Run whose steps, 50 or more, correct the cost model.",
)
@click.option(
    "--objective",
    "goal",
    type=click.Choice(get_args(Goal)),
    default="time",
    help="What is minimized: time of a step; robust: its p95 with late messages and a slow node; energy: joules a "
    "token; cost: price of a token.",
)
@click.option(
    "--power", multiple=True, metavar="TYPE=WATTS", help="Power of a busy device, for energy; else as measured."
)
@click.option("--price", multiple=True, metavar="TYPE=PRICE", help="Price of a device of this type an hour, for cost.")
@click.option(
    "--max-memory",
    type=FiniteNumber(0, 100, min_open=True),
    metavar="PERCENT",
    help="Largest share of a device's memory that a plan may use.  [default: 90]",
)
@click.option("--forbid", metavar="NODES", help="Plan without these nodes: n[3,7].")
@click.option(
    "--min-goodput",
    type=FiniteNumber(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help="Least share of the time that becomes lasting training (0.95), when nodes fail by --node-mtbf.",
)
@click.option(
    "--node-mtbf",
    type=FiniteNumber(0, min_open=True),
    metavar="HOURS",
    help="Mean time between failures of one node, for --min-goodput.",
)
@recover_option(", for --min-goodput")
@nodelist_option("Plan for these nodes of the topology only: local[0-2].")
@set_option
@click.option(
    "--max-age", type=click.FloatRange(0), metavar="DAYS", default=MAX_AGE_DAYS, help="Warn if the topology is older."
)
@click.option("--force", is_flag=True, help="Write over a plan that was edited.")
@click.option("--explain", is_flag=True, help="Say what goes where and why, with the plans that lost.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan on stdout.")
def plan_command(
    run_file: Path, topology_file: Path, output: Path, solver: Solver, previous: Path | None, profiled: str | None,
    forbid: str | None, nodelist: str | None, overrides: tuple[str, ...], force: bool, explain: bool, as_json: bool,
    max_age: float, **wanted: Any
) -> None:  # fmt: skip
    """From RUN.YAML and a topology to a plan: which device computes which blocks of which sequences when.

    You may read and edit the plan: the job follows it exactly. It holds the predicted time of a step by term, the
    memory of each device, a bound that no plan can beat, and the rejected neighbours with their reasons. A plan that
    you edited is overwritten only with --force.

    \b
    Exit codes: 0 done, 2 a file is wrong, 4 the model cannot fit, or the topology is of other nodes.
    """
    if not output.name:
        raise InputError("-o: found no name of a file; give one, such as plan.json")
    if not force:
        _refuse_edited(output)
    run, spec = with_model_sizes(read_run(run_file, overrides), SystemRunner())
    warn(hf_warnings(run))
    topology = Topology.read(topology_file)
    if nodelist is not None:
        topology = select_nodes(topology, nodelist, topology_file)
    with errors_name_file(topology_file):
        warn_if_stale(topology, max_age_days=max_age)
    if forbid is not None:
        topology = _without(topology, forbid)
    known_w = probed_watts(topology) | (run_watts(find_run(profiled, os.environ, Path.cwd())) if profiled else {})
    objective = _objective(known_w, checkpoint_every=run.checkpoint.every, **wanted)
    if solver == "paper" and not objective.only_time:
        raise InputError("--solver paper: it plans for time only; remove --objective and --min-goodput")
    replaced = Plan.read(previous) if previous is not None else None
    profile = _profile(profiled, topology) if profiled is not None else None
    request = PlanRequest(solver=solver, objective=objective)
    with errors_name_file(topology_file):
        plan = make_plan(run, spec, topology, request, previous=replaced, profile=profile).stamped()
    plan.write(output)
    people = table_console(stderr=as_json)
    people.print(_summary(plan, spec), soft_wrap=True)
    if explain:
        more = extra_neighbours(run, spec, topology, plan, objective.usable)
        scene = layout_of_plan(run, spec, plan, topology)
        idle = idle_devices(run, spec, topology, plan, objective.usable)
        people.print(explanation(plan, topology, scene, objective.usable or USABLE_MEMORY_SHARE, more, idle))
    people.print(f"wrote {output}", soft_wrap=True)
    if as_json:
        click.echo(json.dumps(plan.to_json(), indent=1))


def _refuse_edited(output: Path) -> None:
    """Check that the plan file `output` does not exist, or is unchanged since `hpctrain plan` wrote it.

    Raises:
        InputError: `output` was edited, or is another kind of file.
    """
    if not output.exists():
        return
    try:
        edited = Plan.read(output).is_edited
    except FileError:
        edited = True
    if edited:
        raise InputError(
            f"{output}: found a file that was edited, or that this command did not write; "
            "choose another with -o, or write over it with --force"
        )


def _profile(name: str, topology: Topology) -> CalibrationProfile:
    """Return the profile of a run: factors on the cost model's constants, from the run's measured steps.

    Args:
        name: run folder, run's name or job id.

    Raises:
        InputError: the run used other types of devices than those of the topology.
    """
    folder = find_run(name, os.environ, Path.cwd())
    profile = learned_profile(folder, *with_model_sizes(run_of(folder), SystemRunner()))
    if profile.compute and not profile.compute.keys() & topology.device_types.keys():
        raise InputError(
            f"--calibrate-from {name}: its steps were made on {', '.join(profile.compute)}, the topology has "
            f"{', '.join(topology.device_types)}; give a run on such devices"
        )
    return profile


def _without(topology: Topology, nodes: str) -> Topology:
    """Return the topology without some nodes.

    Args:
        nodes: node set that --forbid gives.

    Raises:
        InputError: the topology lacks one of the nodes.
        RefusedError: no node of the topology is left.
    """
    forbidden = set(node_names("--forbid", nodes))
    known = [node.id for node in topology.nodes]
    unknown = sorted(forbidden - set(known))
    if unknown:
        raise InputError(f"--forbid: found {compress_node_set(unknown)}, the topology has {compress_node_set(known)}")
    allowed = [node for node in known if node not in forbidden]
    if not allowed:
        raise RefusedError("--forbid: no node of the topology is left; forbid fewer")
    return topology.only(allowed)


def _objective(
    known_w: dict[str, float], goal: Goal, max_memory: float | None, price: tuple[str, ...], power: tuple[str, ...],
    checkpoint_every: int, **goodput: float | None
) -> Objective:  # fmt: skip
    share, mtbf_hours, recover_s = (goodput[name] for name in ("min_goodput", "node_mtbf", "recover"))
    if (share is None) != (mtbf_hours is None):
        raise InputError("--min-goodput and --node-mtbf go together; give both, or none")
    goodput_constraint = None
    if share is not None and mtbf_hours is not None and recover_s is not None:
        goodput_constraint = GoodputConstraint(share, mtbf_hours * 3600, recover_s, checkpoint_every)
    watts, prices = known_w | numbers_by_name("--power", power), numbers_by_name("--price", price)
    usable = None if max_memory is None else max_memory / 100
    return Objective(goal, watts, prices, usable, goodput_constraint)


def _summary(plan: Plan, spec: Spec) -> str:
    first = plan.replicas[0]
    text = (
        f"{format_count(spec.parameters())} parameters on {plural(plan.world_size, 'device')} of "
        f"{plural(len(plan.nodes), 'node')}: "
        f"{plan.dims}, schedule {plan.schedule}, micro-batch {first.micro_batch}"
    )
    text = ", ".join([text, *memory_options_text(plan)])
    if plan.predicted is not None:
        text += f"\npredicted step time {format_seconds(plan.predicted.step_time_s['total'])}"
        if plan.predicted.useful_bound_s is not None:
            least = format_seconds(plan.predicted.useful_bound_s)
            text += f"; by the cost model, no plan on these devices takes less than {least}"
    return text


WIDTH = 100
"""Columns of the table if it is not printed on a terminal."""
INTERVALS_MIN = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0)
MOST_FAILURES = 100_000
HOUR, DAY = 3600.0, 86400.0


@click.command("failures")
@click.option("--gpus", type=click.IntRange(1), default=10_000, help="GPUs that train.")
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, help="A node fails as a whole.")
@click.option(
    "--node-mtbf",
    type=FiniteNumber(0, min_open=True),
    default=6300.0,
    metavar="HOURS",
    help="Mean time between failures of one node. Default: 419 unexpected interruptions in "
    "54 days on 2,048 nodes of 8 GPUs (Llama 3, 2024).",
)
@click.option("--days", type=FiniteNumber(0, 3650, min_open=True), default=30.0, help="Length of the job.")
@click.option(
    "--interval",
    "intervals",
    multiple=True,
    type=FiniteNumber(0, min_open=True),
    metavar="MINUTES",
    help="Training between two checkpoints; give it again for more. Default: 1, 5, 15, 30, 60, 120.",
)
@click.option(
    "--stall",
    type=FiniteNumber(0),
    default=0.046,
    metavar="SECONDS",
    help="How long training stands still for a checkpoint (default: 220 MB a rank, `hpctrain docs results/runtime`).",
)
@click.option(
    "--save",
    type=FiniteNumber(0),
    default=0.774,
    metavar="SECONDS",
    help="How long until a checkpoint can be used (default: as for --stall).",
)
@recover_option()
@click.option(
    "--queue-wait",
    type=FiniteNumber(0),
    metavar="SECONDS",
    help="What requeueing adds to that. Without it, requeueing is left out: no default would be true.",
)
@click.option("--repair", type=FiniteNumber(0), metavar="HOURS", help="Until a failed node is back. Default: never.")
@click.option("--spares", type=click.IntRange(0), default=0, help="Idle nodes beside the GPUs.")
@click.option("--trials", type=click.IntRange(1, 100_000), default=100, help="Jobs simulated.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Decides which nodes fail when.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on stdout.")
def failures(
    gpus: int, gpus_per_node: int, node_mtbf: float, days: float, intervals: tuple[float, ...], stall: float,
    save: float, recover: float, queue_wait: float | None, repair: float | None, spares: int, trials: int, seed: int,
    as_json: bool,
) -> None:  # fmt: skip
    """A month of failures: predict the goodput, the share of the time that becomes training which is not lost again.

    Nodes fail independently at a constant rate, also while the job recovers. Training speed is proportional to the
    number of nodes that the job has. With recovery in place, the job continues on the nodes that are left; a repaired
    node joins at the next failure. For requeueing, after which the job has all its nodes again, the expected value by
    the formula of Daly (2006) is printed beside the simulation.
    """
    cluster = FailureModel(
        nodes=math.ceil(gpus / gpus_per_node),
        node_mtbf_s=node_mtbf * HOUR,
        stall_s=stall,
        save_s=save,
        recover_s=recover,
        queue_s=math.inf if queue_wait is None else queue_wait,
        repair_s=math.inf if repair is None else repair * HOUR,
        spares=spares,
    )
    intervals_s = sorted({minutes * 60 for minutes in intervals or INTERVALS_MIN})
    if intervals_s[0] + stall < save:
        raise InputError(
            f"--interval: found {intervals_s[0] / 60:g} minutes, shorter than a checkpoint takes ({save:g} s by --save)"
        )
    failures_expected = days * DAY * cluster.nodes / cluster.node_mtbf_s
    if failures_expected > MOST_FAILURES:
        raise InputError(
            f"--node-mtbf: found {node_mtbf:g} hours, {failures_expected:.3g} failures in the job; allowed: up to "
            f"{MOST_FAILURES:g}, with more nothing would be trained"
        )
    modes = [
        mode
        for mode in RECOVERY_MODES
        if (mode != "requeue" or queue_wait is not None) and (mode != "spares" or spares)
    ]
    results = [
        result for mode in modes for result in simulate_goodput(cluster, mode, intervals_s, days * DAY, trials, seed)
    ]
    people = table_console(as_json, WIDTH)
    people.print(_table(cluster, modes, results))
    text = f"{cluster.nodes} nodes, a failure every {format_seconds(cluster.node_mtbf_s / cluster.nodes)}"
    if stall:
        text += f"; Young and Daly would save every {format_seconds(daly_interval(cluster))}"
    people.print(f"{text}.", soft_wrap=True)
    if queue_wait is None:
        people.print("Requeueing is left out: give --queue-wait SECONDS. A job without nodes ends.", soft_wrap=True)
    if as_json:
        rows = [asdict(result) for result in results]
        click.echo(json.dumps({"rows": rows, "daly_interval_s": daly_interval(cluster), "seed": seed}, indent=1))


def _table(cluster: FailureModel, modes: list[RecoveryMode], results: list[Goodput]) -> Table:
    words = {"requeue": "requeue", "in_place": "in place", "spares": f"{cluster.spares} spares"}
    table = Table("checkpoint every", title="Goodput: mean, and what 95 of 100 jobs exceed")
    for mode in modes:
        table.add_column(words[mode], justify="right")
        if mode == "requeue":
            table.add_column("expected (Daly)", justify="right")
    for interval_s in dict.fromkeys(result.interval_s for result in results):
        cells = []
        for mode in modes:
            result = next(result for result in results if (result.interval_s, result.mode) == (interval_s, mode))
            cells.append(f"{result.mean:.1%}, {result.p05:.1%}")
            if mode == "requeue":
                cells.append(f"{daly_goodput(cluster, interval_s):.1%}")
        table.add_row(format_seconds(interval_s), *cells)
    return table
