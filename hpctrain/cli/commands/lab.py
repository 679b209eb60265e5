"""`hpctrain lab`: a real Slurm of several nodes on this machine, with faults on demand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.table import Table

from hpctrain.cli.answers import JSON_OPTION, print_json, say
from hpctrain.cli.options.parameters import PATH
from hpctrain.cli.views.console import table_console
from hpctrain.lab import requirements
from hpctrain.lab.faults import cut as cut_pair
from hpctrain.lab.faults import heal as heal_nodes
from hpctrain.lab.faults import kill_nodes
from hpctrain.lab.faults import shape as shape_links
from hpctrain.lab.layout import LabLayout, SlurmInstallation, load_layout, state_folder
from hpctrain.lab.machine import Machine, lab_lock, this_machine
from hpctrain.lab.network import DIRECTIONS
from hpctrain.lab.spec import LabSpec, rate_bits_per_s, read_lab_spec
from hpctrain.lab.status import LabStatus, NodeStatus, read_lab_status
from hpctrain.lab.up import bring_up, clear, make_blueprint, slurm_version


class _Rate(click.ParamType[str | None]):
    """A click type for a link rate in the form that `tc` takes, such as 100mbit; 'none' becomes None, no limit."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | None:
        if value == "none":
            return None
        try:
            rate_bits_per_s(value)
        except ValueError as error:
            self.fail(f"found {value!r}; {error}; none: not shaped", param, ctx)
        return str(value)


@click.group()
def lab_command() -> None:
    """A real Slurm of several nodes on this machine, with faults on demand.

    Each node is a network namespace with its own host name, address, shaped link and slurmd; all nodes share the file
    system. Needs root. State lies in $HPCTRAIN_LAB, by default /run/hpctrain-lab. NODE is a name, a set such as
    node[0-1], or all.
    """


@lab_command.command()
@click.argument("spec", type=PATH, required=False)
@click.option("--nodes", type=click.IntRange(1, 500), help="Number of nodes, in place of a spec file.  [default: 4]")
@click.option("--slurm", "prefix", type=PATH, metavar="PREFIX",
              help="Folder with bin, sbin and lib/slurm of another Slurm.  [default: what the path has]")  # fmt: skip
@click.option("--install", is_flag=True, help="Install missing Debian or Ubuntu packages first.")
@click.option("--replace", is_flag=True, help="Take down a lab that is up.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@JSON_OPTION
def up(
    spec: Path | None, nodes: int | None, prefix: Path | None, install: bool, replace: bool, dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Build a lab, from SPEC.yaml or of --nodes nodes, and print the shell line that lets your commands use its Slurm.

    Leftovers of an earlier lab are removed first. The last line on stdout is `export SLURM_CONF=…`, so that after `eval
    "$(hpctrain lab up)"` your sbatch, srun and squeue use the lab; with --slurm, a line for PATH comes before it.
    """
    if spec is not None and nodes is not None:
        raise click.UsageError("give either SPEC or --nodes, not both")
    layout = LabLayout(state_folder(os.environ), _with_slurm(_spec(spec, nodes), prefix))
    machine = this_machine()
    if dry_run:
        lines = make_blueprint(machine, layout, _version(machine, layout.slurm)).lines()
        print_json({"blueprint": list(lines)}) if as_json else say(lines)
        return
    requirements.require_root(machine, "up")
    with lab_lock():
        if install and requirements.install(machine, layout.slurm):
            click.echo("installed: " + " ".join(requirements.PACKAGES), err=True)
        requirements.require_programs(layout.slurm)
        began_s = machine.clock.now()
        bring_up(machine, layout, replace, tell=lambda text: click.echo(text, err=True))
    seconds = machine.clock.now() - began_s
    click.echo(f"up: {len(layout.names)} nodes in {seconds:.1f} s", err=True)
    if as_json:
        print_json({"nodes": layout.names, "seconds": seconds, "exports": layout.exports})
        return
    _export(layout)


@lab_command.command()
@JSON_OPTION
def down(as_json: bool) -> None:
    """Remove the lab: processes, namespaces, interfaces, lines in /etc/hosts, cgroups and its folder."""
    machine = this_machine()
    requirements.require_root(machine, "down")
    with lab_lock():
        removed = clear(machine, state_folder(os.environ))
    click.echo(f"taken down: {removed.summary()}" if removed else "nothing to take down", err=True)
    if as_json:
        print_json({"removed": removed.summary() if removed else None})


@lab_command.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
def status(as_json: bool) -> None:
    """Show the lab's nodes, links and jobs, as the kernel and Slurm see them now."""
    machine, layout = _lab("status")
    lab = read_lab_status(machine, layout)
    if as_json:
        click.echo(json.dumps(lab.to_json(), allow_nan=False))
        return
    _show(lab)
    _export(layout)


@lab_command.command()
@click.argument("node", nargs=-1, required=True)
@click.option("--silent", is_flag=True, help="Take the link down first, so that no other node sees closed connections.")
@click.option("--hang", is_flag=True, help="Stop the processes (SIGSTOP) instead of ending them.")
@JSON_OPTION
def kill(node: tuple[str, ...], silent: bool, hang: bool, as_json: bool) -> None:
    """Fail NODE: send SIGKILL to all its processes, including slurmd and job steps. With --hang, send SIGSTOP
    instead."""
    if silent and hang:
        raise click.UsageError("give either --silent or --hang, not both")
    machine, layout = _lab("kill")
    names = layout.find(node)
    with lab_lock():
        counts = kill_nodes(machine, layout, names, "silent" if silent else "hang" if hang else "kill")
    for name, count in counts.items():
        click.echo(f"{name}: {'stopped' if hang else 'killed'} {count} process{'' if count == 1 else 'es'}", err=True)
    if as_json:
        print_json({"nodes": [{"name": name, "processes": count} for name, count in counts.items()]})


@lab_command.command()
@click.argument("node", nargs=-1, required=True)
@JSON_OPTION
def heal(node: tuple[str, ...], as_json: bool) -> None:
    """Undo every fault of NODE, restart its slurmd if it is gone, and wait until Slurm uses the node again."""
    machine, layout = _lab("heal")
    names = layout.find(node)
    with lab_lock():
        states = heal_nodes(machine, layout, names)
    for name, state in states.items():
        click.echo(f"{name}: {state.text}", err=True)
    if as_json:
        print_json({"nodes": [{"name": name, "state": state.text} for name, state in states.items()]})


@lab_command.command()
@click.argument("a")
@click.argument("b")
@JSON_OPTION
def cut(a: str, b: str, as_json: bool) -> None:
    """Stop all traffic between the nodes A and B; both still reach the other nodes and the controller."""
    machine, layout = _lab("cut")
    pairs = [(one, other) for one in layout.find([a]) for other in layout.find([b])]
    with lab_lock():
        for one, other in pairs:
            cut_pair(machine, layout, one, other)
            click.echo(f"{one} and {other}: cut", err=True)
    if as_json:
        print_json({"cut": pairs})


@lab_command.command()
@click.argument("node", nargs=-1, required=True)
@click.option("--rate", type=_Rate(), required=True, help="For instance 100mbit; none: as fast as it goes.")
@click.option("--direction", type=click.Choice(["in", "out", "both"]), default="both",
              help="Traffic into the node, out of it, or both.")  # fmt: skip
@JSON_OPTION
def shape(node: tuple[str, ...], rate: str | None, direction: str, as_json: bool) -> None:
    """Change the rate of NODE's link; `lab heal` restores the rate of the spec."""
    machine, layout = _lab("shape")
    names = layout.find(node)
    chosen = [one for one in DIRECTIONS if direction in (one, "both")]
    with lab_lock():
        shape_links(machine, layout, names, rate, chosen)
    for name in names:
        click.echo(f"{name}: {' and '.join(chosen)} {rate or 'not shaped'}", err=True)
    if as_json:
        print_json({"nodes": names, "directions": chosen, "rate": rate})


def _lab(verb: str) -> tuple[Machine, LabLayout]:
    machine = this_machine()
    requirements.require_root(machine, verb)
    return machine, load_layout(state_folder(os.environ))


def _spec(path: Path | None, nodes: int | None) -> LabSpec:
    if path is not None:
        return read_lab_spec(path)
    return LabSpec.from_json({"nodes": nodes} if nodes is not None else {}, "--nodes")


def _with_slurm(spec: LabSpec, prefix: Path | None) -> LabSpec:
    if prefix is None:
        return spec
    values = spec.to_json()
    return LabSpec.from_json({**values, "slurm": {**values["slurm"], "prefix": str(Path.cwd() / prefix)}}, "--slurm")


def _version(machine: Machine, slurm: SlurmInstallation) -> tuple[int, int]:
    """Return Slurm's version as (major, minor). A dry run may lack Slurm; the version is then (22, 5), that of Debian
    12."""
    if slurm.prefix is None and "slurmd" in requirements.missing_programs(slurm):
        return (22, 5)
    return slurm_version(machine, slurm)


def _show(lab: LabStatus) -> None:
    table_console().print(_table(lab))
    for job in lab.jobs:
        where = f" on {job['nodes']}" if job["nodes"] else f" ({job['reason']})"
        click.echo(f"job {job['id']} {job['name']}: {job['state'].lower()} in {job['partition']}{where}")
    if not lab.controller:
        click.echo("the controller does not run; `hpctrain lab up --replace` builds the lab anew")


def _export(layout: LabLayout) -> None:
    for line in layout.exports:
        click.echo(line)


def _table(lab: LabStatus) -> Table:
    """Return the table of `lab status` with a row for each node. The columns switch, cut from and cpu share are left
    out if all rows are equal in them."""
    columns = ("node", "address", "switch", "state", "processes", "out", "in", "cut from", "cpu share")
    rows = [_row(node) for node in lab.nodes]
    always = {"node", "address", "state", "processes", "out", "in"}
    shown = [at for at, name in enumerate(columns) if name in always or len({row[at] for row in rows}) > 1]
    table = Table(*(columns[at] for at in shown), box=SIMPLE, pad_edge=False)
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    return table


def _row(node: NodeStatus) -> tuple[str, ...]:
    return (
        node.name,
        node.address,
        node.switch,
        node.state or "?",
        str(node.processes),
        _rate(node, node.out_bits_per_s),
        _rate(node, node.in_bits_per_s),
        " ".join(node.cut_from) or "-",
        "-" if node.cpu_share is None else f"{node.cpu_share:g}",
    )


def _rate(node: NodeStatus, bits_per_s: float | None) -> str:
    if not node.link_up:
        return "link down"
    if bits_per_s is None:
        return "not shaped"
    number, unit = (bits_per_s / 1e9, "gbit") if bits_per_s >= 1e9 else (bits_per_s / 1e6, "mbit")
    return f"{number:g}{unit}"  # in the form that --rate accepts
