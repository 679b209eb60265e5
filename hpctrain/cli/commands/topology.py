"""Commands for topology files: `probe` measures one, `topology` reads, compares and converts them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_DONE, EXIT_REFUSED, EXIT_WARNINGS, InputError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import JSON_OPTION, print_json, say, warn
from hpctrain.cli.options.given_topology import nodelist_option, select_nodes
from hpctrain.cli.options.parameters import FILE, PATH, node_names
from hpctrain.cli.options.slurm_options import SlurmOptions, slurm_options
from hpctrain.cli.views.console import Console
from hpctrain.launch.local import check_gpus
from hpctrain.launch.probe import ProbeJob, ProbeRequest, measure_topology
from hpctrain.probe.measure.settings import FULL_UP_TO, MODES, Mode, default_mode
from hpctrain.records.format.input_file import read_input_text
from hpctrain.records.run.cluster import CPU_DEVICES_MAX
from hpctrain.records.topology.topology import Topology
from hpctrain.topology.compare import differences
from hpctrain.topology.formats.nccl import from_nccl, nccl_files
from hpctrain.topology.formats.other_planners import metis_files, network_yml
from hpctrain.topology.formats.pairs_csv import pairs_csv
from hpctrain.topology.formats.slurm import block_yaml, from_slurm, tree_conf
from hpctrain.topology.matrix_view import QUANTITIES
from hpctrain.topology.view import render, render_differences, summary

EXIT_CODES = {"go": EXIT_DONE, "warn": EXIT_WARNINGS, "refuse": EXIT_REFUSED}
LOCAL_MOST = 64
_PHASES = {
    "join": "{done} of {planned} nodes are there",
    "links": "links: {done} of {planned} rounds",
    "devices": "devices: {done} of {planned} nodes at work",
    "backend": "messages over the training backend",
}


@click.command()
@click.option("--local", "local", type=click.IntRange(1, LOCAL_MOST), metavar="N", help="N virtual nodes, here.")
@slurm_options
@click.option("-o", "--output", type=FILE, default=Path("topology.json"), help="File to write.")
@click.option("--json", "as_json", is_flag=True, help="Also print the topology as JSON on stdout.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Devices to measure.")
@click.option(
    "--cpu-devices",
    type=click.IntRange(1, CPU_DEVICES_MAX),
    default=1,
    metavar="N",
    help="Cut each node without GPUs into N devices, as cluster.devices_per_node does.",
)
@click.option("--seed", type=int, default=0, help="Orders the rounds.")
@click.option("--mode", type=click.Choice(MODES), help=f"Default: full up to {FULL_UP_TO} nodes, else sampled.")
@click.option("--prior", type=FILE, help="For sampled and health: a topology that says which nodes share a switch.")
@click.pass_context
def probe_command(
    ctx: click.Context, local: int | None, output: Path, as_json: bool, device: str, cpu_devices: int, seed: int,
    mode: Mode | None, prior: Path | None, **slurm: Any
) -> None:  # fmt: skip
    """Measure nodes, devices and links into a topology file.

    Pairs of nodes measure latency and bandwidth (timed at the receiver), in rounds in which no node is busy twice.
    Every device measures matrix products, memory and the time of a tiny operation. With -N, the probe is a Slurm job of
    N nodes; inside an allocation, it measures N of the allocation's nodes.

    Mode health judges each node in 15 rounds, whatever the number of nodes; full measures every pair; sampled finds out
    which nodes share a switch and measures as many pairs as that takes. See `hpctrain docs probe`.

    \b
    Exit codes: 0 go, 3 go with warnings, 4 refused. The file is written in each case.
    """
    people, runner = Console(stderr=as_json, highlight=False, markup=False), SystemRunner()
    options = SlurmOptions(**slurm)
    if (local is not None) == options.names_nodes:
        raise InputError("give one of --local N (virtual nodes of this machine) and -N N (a Slurm job)")
    where: int | ProbeJob
    if local is not None:
        options.check_given_with_nodes()
        warn(check_gpus(local, device, os.environ))
        where, count = local, local
    else:
        where, lines = options.node_job("hpctrain-probe", runner)
        say(lines, err=True)
        count = where.nodes
    request = ProbeRequest(device, seed, mode or default_mode(count), prior, cpu_devices=cpu_devices)
    with _progress(Console(stderr=True)) as progress:
        topology = measure_topology(where, output, runner, SystemClock(), request, progress, people.print)
    people.print(render(topology))
    people.print(f"wrote {output}", highlight=False)
    if as_json:
        click.echo(json.dumps(topology.to_json(), indent=1))
    ctx.exit(EXIT_CODES[topology.verdict.status])


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a probe's progress. It takes the phase (a key of `_PHASES`), and how much is done and
    planned.

    A terminal shows one line that changes; elsewhere each phase prints one line.
    """
    if console.is_terminal:
        with console.status("starting the nodes") as status:
            yield lambda phase, done, planned: status.update(_PHASES[phase].format(done=done, planned=planned))
        return
    seen: set[str] = set()

    def print_once(phase: str, done: int, planned: int) -> None:
        if phase not in seen:
            seen.add(phase)
            console.print(_PHASES[phase].format(done=done, planned=planned), highlight=False)

    yield print_once


_LARGEST_BYTES = 4 * 2**20
"""Largest file that `topology import` reads, in bytes; files of Slurm and NCCL are below a megabyte."""

FORMATS: dict[str, Callable[[Topology], dict[str, str]]] = {
    "slurm": lambda topology: {"topology.conf": tree_conf(topology)},
    "slurm-block": lambda topology: {"topology.yaml": block_yaml(topology)},
    "nccl": nccl_files,
    "metis": metis_files,
    "astra-sim": lambda topology: {"network.yml": network_yml(topology)},
    "csv": lambda topology: {"links.csv": pairs_csv(topology)},
}
"""For each format of `topology export`, the function that returns the format's files: text by file name."""


@click.group()
def topology_command() -> None:
    """Read, compare and convert topology files."""


@topology_command.command()
@click.argument("file", type=PATH)
@click.option("--matrix", type=click.Choice(QUANTITIES), help="Draw only this matrix. Default: both.")
@click.option("--json", "as_json", is_flag=True, help="Print the checked file as JSON.")
def show(file: Path, matrix: str | None, as_json: bool) -> None:
    """Show the faults in the topology FILE, then devices, clusters, and the matrices of latency and bandwidth.

    With more than 16 nodes, the matrices have a row for each cluster. Colours show how far a link is from the median of
    the links of its class. Only terminals get colours, and NO_COLOR turns them off.
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
    """Show what changed from the topology BEFORE to AFTER: nodes, health, drivers, devices, links."""
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
@nodelist_option("Only these nodes of the topology: n[1-4].")
@JSON_OPTION
def export(file: Path, form: str, output: Path | None, nodelist: str | None, as_json: bool) -> None:
    """Write the topology FILE in another tool's format.

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
    if nodelist is not None:
        topology = select_nodes(topology, nodelist, file)
    texts = FORMATS[form](topology)
    if output is None:
        if as_json:
            print_json({"files": [{"name": name, "path": None, "text": text} for name, text in texts.items()]})
            return
        if len(texts) > 1:
            raise InputError(f"--to {form}: {len(texts)} files ({', '.join(texts)}); give a folder with -o")
        click.echo(next(iter(texts.values())), nl=False)
        return
    paths = _write(texts, output)
    if as_json:
        print_json({"files": [{"name": path.name, "path": str(path), "text": None} for path in paths]})
        return
    for path in paths:
        click.echo(f"wrote {path}")


@topology_command.command("import")
@click.argument("file", type=PATH)
@click.option(
    "--from", "form", type=click.Choice(["nccl", "slurm"]), help="What FILE is. Default: nccl for .xml, else slurm."
)
@nodelist_option("nccl: nodes that the dump describes. Default: FILE's name.")
@click.option("-o", "--output", type=PATH, default=Path("prior.json"), help="File to write.")
@JSON_OPTION
def import_(file: Path, form: str | None, nodelist: str | None, output: Path, as_json: bool) -> None:
    """Make a topology file without measurements from another tool's FILE, for use as a probe's prior.

    FILE is a dump of NCCL (NCCL_TOPO_DUMP_FILE), or Slurm's topology.conf or topology.yaml.
    """
    form = form or ("nccl" if file.suffix == ".xml" else "slurm")
    text, now = read_input_text(file, _LARGEST_BYTES), SystemClock().wall()
    if form == "nccl":
        topology = from_nccl(text, str(file), _node_names(nodelist, file), now)
    elif nodelist is not None:
        raise InputError("--nodelist: Slurm's files name their nodes themselves; leave it out")
    else:
        topology = from_slurm(text, str(file), now)
    topology.write(output)
    devices = sum(len(node.devices) for node in topology.nodes)
    clusters = len(topology.fabric.clusters)
    if as_json:
        counts = {"nodes": len(topology.nodes), "devices": devices, "clusters": clusters}
        print_json({"topology": str(output), **counts})
        return
    click.echo(f"wrote {output}: {len(topology.nodes)} node(s), {devices} device(s), {clusters} cluster(s), as a prior")


def _write(texts: dict[str, str], output: Path) -> list[Path]:
    """Write an exported topology's files and return their paths.

    Args:
        texts: text by file name.
        output: path of a single file. For several files, or if it is a folder: the folder that gets the files, made if
            missing.

    Raises:
        InputError: there are several files and `output` is a file, or the folder cannot be made.
        StorageError: a file cannot be written.
    """
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
    names = node_names("--nodelist", file.stem if nodes is None else nodes)
    if not names:
        raise InputError("--nodelist: it names no node; write it like n[1-4] or a,b")
    return names
