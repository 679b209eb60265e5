"""`hpctrain topology`: read, compare and convert topology files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.cli.options.given_topology import select_nodes
from hpctrain.cli.options.parameters import PATH, node_names
from hpctrain.cli.views.console import Console
from hpctrain.records.format.input_file import read_input_text
from hpctrain.records.topology.topology import Topology
from hpctrain.topology.compare import differences
from hpctrain.topology.formats.nccl import nccl_files
from hpctrain.topology.formats.other_planners import metis_files, network_yml
from hpctrain.topology.formats.pairs_csv import pairs_csv
from hpctrain.topology.formats.slurm import block_yaml, tree_conf
from hpctrain.topology.imports import from_nccl, from_slurm
from hpctrain.topology.matrix_view import QUANTITIES
from hpctrain.topology.view import render, render_differences, summary

_LARGEST_BYTES = 4 * 2**20
"""Largest file to import, in bytes; files of Slurm and NCCL are below a megabyte."""

FORMATS: dict[str, Callable[[Topology], dict[str, str]]] = {
    "slurm": lambda topology: {"topology.conf": tree_conf(topology)},
    "slurm-block": lambda topology: {"topology.yaml": block_yaml(topology)},
    "nccl": nccl_files,
    "metis": metis_files,
    "astra-sim": lambda topology: {"network.yml": network_yml(topology)},
    "csv": lambda topology: {"links.csv": pairs_csv(topology)},
}
"""Functions by format; each returns the format's files, as text by file name."""


@click.group()
def topology_command() -> None:
    """Read, compare and convert topology files."""


@topology_command.command()
@click.argument("file", type=PATH)
@click.option("--matrix", type=click.Choice(QUANTITIES), help="Draw only this matrix. Default: both.")
@click.option("--json", "as_json", is_flag=True, help="Print the checked file as JSON.")
def show(file: Path, matrix: str | None, as_json: bool) -> None:
    """Show the faults in FILE, then devices, clusters, and the matrices of latency and bandwidth.

    With more than 16 nodes, the matrices have a row for each cluster. Colours show how far a link is from the median of
    its kind. Only terminals get colours, and NO_COLOR turns them off.
    """
    topology = Topology.read(file)
    if as_json:
        click.echo(json.dumps(topology.to_json(), indent=1))
        return
    Console(highlight=False, markup=False).print(render(topology, QUANTITIES if matrix is None else (matrix,)))


@topology_command.command()
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@click.option("--tolerance", type=click.FloatRange(0), default=0.1, help="Leave out differences up to this share.")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
def diff(before: Path, after: Path, tolerance: float, as_json: bool) -> None:
    """Show what changed from BEFORE to AFTER: nodes, health, drivers, devices, links."""
    changes = differences(Topology.read(before), Topology.read(after), tolerance)
    if as_json:
        rows = [
            {"group": d.group, "what": d.what, "unit": d.unit, "before": d.before, "after": d.after, "better": d.better}
            for d in changes
        ]
        click.echo(json.dumps({"differences": rows, "summary": summary(changes)}, indent=1))
        return
    Console(highlight=False, markup=False).print(render_differences(changes, tolerance))


@topology_command.command()
@click.argument("file", type=PATH)
@click.option("--to", "form", type=click.Choice(list(FORMATS)), required=True, help="Format to write.")
@click.option("-o", "--output", type=PATH, help="File or folder to write. Default: stdout, for one file.")
@click.option("--nodes", metavar="NODES", help="Only these nodes of the topology: n[1-4].")
def export(file: Path, form: str, output: Path | None, nodes: str | None) -> None:
    """Write FILE in another tool's format.

    \b
    slurm        topology.conf for TopologyPlugin=topology/tree
    slurm-block  topology.yaml for topology/block
    nccl         one XML for each kind of node, for NCCL_TOPO_FILE
    metis        clusterfile.json and hostfile
    astra-sim    network.yml of the analytical network
    csv          one row for each directed pair of nodes

    The command fails if FILE lacks a figure that the format needs.
    """
    topology = Topology.read(file)
    if nodes is not None:
        topology = select_nodes(topology, nodes, file)
    texts = FORMATS[form](topology)
    if output is None:
        if len(texts) > 1:
            raise InputError(f"--to {form}: {len(texts)} files ({', '.join(texts)}); give a folder with -o")
        click.echo(next(iter(texts.values())), nl=False)
        return
    for path in _write(texts, output):
        click.echo(f"wrote {path}")


@topology_command.command("import")
@click.argument("file", type=PATH)
@click.option(
    "--from", "form", type=click.Choice(["nccl", "slurm"]), help="What FILE is. Default: nccl for .xml, else slurm."
)
@click.option("--nodes", metavar="NODES", help="nccl: nodes that are as the dump says. Default: FILE's name.")
@click.option("-o", "--output", type=PATH, default=Path("prior.json"), help="File to write.")
def import_(file: Path, form: str | None, nodes: str | None, output: Path) -> None:
    """Make a topology from another tool's FILE, for use as a prior: it holds no measurements.

    FILE is a dump of NCCL (NCCL_TOPO_DUMP_FILE), or Slurm's topology.conf or topology.yaml.
    """
    form = form or ("nccl" if file.suffix == ".xml" else "slurm")
    text, now = read_input_text(file, _LARGEST_BYTES), SystemClock().wall()
    if form == "nccl":
        topology = from_nccl(text, str(file), _node_names(nodes, file), now)
    elif nodes is not None:
        raise InputError("--nodes: Slurm's files name their nodes themselves; leave it out")
    else:
        topology = from_slurm(text, str(file), now)
    topology.write(output)
    devices = sum(len(node.devices) for node in topology.nodes)
    clusters = len(topology.fabric.clusters)
    click.echo(f"wrote {output}: {len(topology.nodes)} node(s), {devices} device(s), {clusters} cluster(s), as a prior")


def _write(texts: dict[str, str], output: Path) -> list[Path]:
    """Write the files and return their paths. Several files go into the folder `output`, which is made if needed. A
    single file goes to `output`, or into `output` if that is a folder."""
    if len(texts) == 1 and not output.is_dir():
        paths = {output: next(iter(texts.values()))}
    else:
        if output.exists() and not output.is_dir():
            raise InputError(f"--output {output}: it is a file; {len(texts)} files need a folder")
        try:
            output.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"--output {output}: cannot make the folder: {error.strerror}") from None
        paths = {output / name: text for name, text in texts.items()}
    for path, text in paths.items():
        write_text(path, text)
    return list(paths)


def _node_names(nodes: str | None, file: Path) -> list[str]:
    names = node_names("--nodes", file.stem if nodes is None else nodes)
    if not names:
        raise InputError("--nodes: it names no node; write it like n[1-4] or a,b")
    return names
