"""`hpctrain plan`: from a run file and a topology to a plan, with its reasons."""

from __future__ import annotations

import json
from pathlib import Path

import click
from ClusterShell.NodeSet import NodeSet, NodeSetException
from rich.console import Console, Group
from rich.table import Table

from hpctrain.base.errors import InputError, Refused
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_bytes, format_count, format_seconds
from hpctrain.launch.own_model import with_sizes
from hpctrain.planner import Solver, make_plan
from hpctrain.records.imported_spec import Spec
from hpctrain.records.plan import Plan
from hpctrain.records.run import read_run
from hpctrain.records.topology import Topology

WIDTH = 120
"""Columns of the explanation where it does not go to a terminal."""


@click.command("plan")
@click.argument("run_file", metavar="RUN.YAML", type=click.Path(path_type=Path))
@click.option(
    "-t",
    "--topology",
    "topology_file",
    required=True,
    type=click.Path(path_type=Path),
    help="Topology file, as `hpctrain probe` writes it.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("plan.json"),
    show_default=True,
    help="File to write.",
)
@click.option(
    "--solver",
    type=click.Choice(["auto", "exact", "paper"]),
    default="auto",
    show_default=True,
    help="auto: the fastest by the cost model; exact: compares every plan on up to 8 devices; "
    "paper: the paper's equations (1) and (7).",
)
@click.option(
    "--previous",
    type=click.Path(path_type=Path),
    help="Plan that this one replaces: state stays where it is as far as it can, and the plan lists what moves.",
)
@click.option("--nodes", metavar="NODES", help="Plan for these nodes of the topology only: local[0-2].")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file.")
@click.option("--explain", is_flag=True, help="Say what goes where and why, with the plans that lost.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan on stdout.")
def command(
    run_file: Path, topology_file: Path, output: Path, solver: Solver, previous: Path | None, nodes: str | None,
    overrides: tuple[str, ...], explain: bool, as_json: bool,
) -> None:  # fmt: skip
    """From RUN.YAML and a topology to a plan: which device computes which blocks of which sequences when.

    The plan is a file to read and to edit: the job obeys it to the letter. It holds the predicted time of a step by
    term, the memory of each device, a bound that no plan can beat, and why its neighbours lost.

    \b
    Exit codes: 0 done, 2 a file is wrong, 4 the model cannot fit, or the topology is of other nodes.
    """
    run, spec = with_sizes(read_run(run_file, overrides), SystemRunner())
    topology = Topology.read(topology_file)
    if nodes is not None:
        topology = _only(topology, nodes, topology_file)
    replaced = Plan.read(previous) if previous is not None else None
    plan = make_plan(run, spec, topology, solver=solver, previous=replaced)
    plan.write(output)
    people = Console(stderr=as_json, highlight=False)
    if not people.is_terminal:
        people = Console(stderr=as_json, highlight=False, width=WIDTH)
    people.print(_summary(plan, spec), soft_wrap=True)
    if explain:
        people.print(explanation(plan, topology))
    people.print(f"wrote {output}", soft_wrap=True)
    if as_json:
        click.echo(json.dumps(plan.to_json(), indent=1))


def explanation(plan: Plan, topology: Topology) -> Group:
    """What goes where, how long it takes, what it keeps in memory, and what lost against it."""
    parts = [_where(plan), _time(plan), _memory(plan, topology)]
    if plan.rejected:
        parts.append(_rejected(plan))
    return Group(*parts, *(f"note: {note}" for note in plan.notes))


def _only(topology: Topology, nodes: str, source: Path) -> Topology:
    try:
        wanted = list(NodeSet(nodes))
    except NodeSetException as error:
        raise InputError(f"--nodes {nodes}: {error}; write it like local[0-2] or a,b") from None
    known = [node.id for node in topology.nodes]
    missing = [node for node in wanted if node not in known]
    if missing or not wanted:
        raise Refused(
            f"{source}: nodes: found {NodeSet.fromlist(known)}, it has no figures of {NodeSet.fromlist(missing)}; "
            "probe these nodes, or name others with --nodes"
        )
    return topology.only(wanted)


def _summary(plan: Plan, spec: Spec) -> str:
    first = plan.replicas[0]
    text = (
        f"{format_count(spec.parameters())} parameters on {plan.world_size} devices of {len(plan.nodes)} nodes: "
        f"pp {plan.pp} × dp {plan.dp} × tp {plan.tp}, schedule {plan.schedule}, micro-batch {first.micro_batch}"
    )
    text = ", ".join([text, *plan.savings])
    if plan.predicted is not None:
        text += f"\npredicted step time {format_seconds(plan.predicted.step_time_s['total'])}"
        if plan.predicted.bound_s is not None:
            text += f"; no plan on these devices beats {format_seconds(plan.predicted.bound_s)}"
    return text


def _where(plan: Plan) -> Table:
    table = Table("replica", "rows", "micro-batches", "stage", "blocks", "devices", title="What goes where")
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(plan.stages):
            head = (str(number), str(replica.rows), f"{replica.micro_batches} of {replica.micro_batch}")
            start, stop = stage.layers
            ends = " + embedding" * (index == 0) + " + head" * (index == len(plan.stages) - 1)
            blocks = (f"{start}–{stop - 1}" if stop > start else "none") + ends
            table.add_row(*(head if index == 0 else ("", "", "")), str(index), blocks, " ".join(replica.devices[index]))
    return table


def _time(plan: Plan) -> Table:
    table = Table("term", "seconds", "share", title="Predicted time of a step")
    terms = plan.predicted.step_time_s if plan.predicted else {}
    for term, seconds in terms.items():
        table.add_row(term, format_seconds(seconds), f"{seconds / terms['total']:.0%}")
    if plan.predicted and plan.predicted.bound_s is not None:
        bound = plan.predicted.bound_s
        table.add_row("bound", format_seconds(bound), f"{bound / terms['total']:.0%}")
    return table


def _memory(plan: Plan, topology: Topology) -> Table:
    table = Table("device", "predicted", "memory", "share (90 % may be used)", title="Memory")
    for place, need in (plan.predicted.memory_bytes if plan.predicted else {}).items():
        memory = topology.device(place).memory_bytes
        known = (format_bytes(memory), f"{need / memory:.0%}") if memory else ("not measured", "")
        table.add_row(place, format_bytes(need), *known)
    return table


def _rejected(plan: Plan) -> Table:
    table = Table("instead", "slower by", "because", title="What lost")
    for entry in plan.rejected:
        slower = "cannot run" if entry.delta_s is None else format_seconds(entry.delta_s)
        table.add_row(entry.change, slower, entry.reason)
    return table
