"""`hpctrain probe`: measure nodes, devices and links into a topology file, with a verdict."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_DONE, EXIT_REFUSED, EXIT_WARNINGS, HpctrainError, InputError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.options.parameters import FILE
from hpctrain.cli.views.console import Console
from hpctrain.launch.preflight.site import VARIABLES, site_defaults
from hpctrain.launch.probe import ProbeJob, ProbeRequest, probe_job, probe_local
from hpctrain.probe.measure.settings import FULL_UP_TO, MODES, PARTIAL_FILE, Mode, default_mode
from hpctrain.records.topology.topology import Topology
from hpctrain.slurm.commands import Slurm
from hpctrain.topology.view import render

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
@click.option("-N", "--nodes", type=click.IntRange(1), metavar="N", help="N nodes, as a Slurm job.")
@click.option("-p", "--partition", help="Slurm partition of that job.")
@click.option("-A", "--account", help="Slurm account of that job.")
@click.option("-q", "--qos", help="Slurm quality of service of that job.")
@click.option("--time", "time", default="15", help="Wall-time limit of that job, as sbatch reads it.")
@click.option(
    "--gpus-per-node", type=click.IntRange(0), metavar="N", help="GPUs of a node to ask for. Default: all it has."
)
@click.option("-w", "--nodelist", help="Exactly these nodes: node[1-4].")
@click.option("-o", "--output", type=FILE, default=Path("topology.json"), help="File to write.")
@click.option("--json", "as_json", is_flag=True, help="Also print the topology as JSON on stdout.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Devices to measure.")
@click.option("--seed", type=int, default=0, help="Orders the rounds.")
@click.option("--mode", type=click.Choice(MODES), help=f"Default: full up to {FULL_UP_TO} nodes, else sampled.")
@click.option("--prior", type=FILE, help="For sampled: a topology that says which nodes share a switch.")
@click.pass_context
def probe_command(
    ctx: click.Context, local: int | None, nodes: int | None, partition: str | None, account: str | None,
    qos: str | None, time: str, gpus_per_node: int | None, nodelist: str | None, output: Path, as_json: bool,
    device: str, seed: int, mode: Mode | None, prior: Path | None
) -> None:  # fmt: skip
    """Measure nodes, devices and links into a topology file.

    Every pair of nodes measures latency and bandwidth (timed at the receiver), in rounds in which no node is busy
    twice. Every device measures matrix products, memory and the time of a tiny operation. With -N, Slurm chooses the
    nodes of a job of this size; inside an allocation, its nodes are measured.

    Mode health judges each node in 15 rounds, whatever the number of nodes; full measures every pair; sampled finds out
    which nodes share a switch and measures as many pairs as that takes. See docs/probe.md.

    \b
    Exit codes: 0 go, 3 go with warnings, 4 refused. The file is written in each case.
    """
    if (local is None) == (nodes is None):
        raise InputError("give one of --local N (virtual nodes of this machine) and -N N (a Slurm job)")
    _check_output(output)
    people, runner, clock = Console(stderr=as_json, highlight=False, markup=False), SystemRunner(), SystemClock()
    mode = mode or default_mode(local or nodes or 1)
    if prior is not None:
        _check_prior(prior, mode, local is not None)
    request = ProbeRequest(device, seed, mode, prior)
    with (
        _scratch(output, shared=nodes is not None) as folder,
        _rescued(folder, output, people),
        _progress(Console(stderr=True)) as progress,
    ):
        if local is not None:
            topology = probe_local(local, folder, runner, clock, request, progress)
        else:
            assert nodes is not None, "checked above"
            job = ProbeJob(nodes, partition, account, qos, time, nodelist, gpus_per_node)
            topology = probe_job(_with_site(job, runner), folder, runner, clock, request, progress)
    topology.write(output)
    people.print(render(topology))
    people.print(f"wrote {output}", highlight=False)
    if as_json:
        click.echo(json.dumps(topology.to_json(), indent=1))
    ctx.exit(EXIT_CODES[topology.verdict.status])


def _with_site(job: ProbeJob, runner: SystemRunner) -> ProbeJob:
    """Return the job with values for the options that were not given: from the profile of this cluster in site.yaml,
    otherwise from variables such as SBATCH_ACCOUNT. Inside an allocation the job is unchanged, because none is
    requested."""
    if "SLURM_JOB_ID" in os.environ:
        return job
    defaults = site_defaults(None, Slurm(runner), os.environ)
    cluster = defaults.values.get("cluster", {}) if defaults else {}
    values = {key: cluster.get(key) or os.environ.get(name) for key, name in VARIABLES.items()}
    taken: dict[str, Any] = {key: value for key, value in values.items() if value and getattr(job, key) is None}
    for key, value in taken.items():
        source = f"profile '{defaults.profile}' of {defaults.path}" if defaults and key in cluster else VARIABLES[key]
        click.echo(f"{key}: {value}, from {source}", err=True)
    return replace(job, **taken)


@contextmanager
def _scratch(output: Path, shared: bool) -> Iterator[Path]:
    """Yield a temporary folder for the probe's files; if `shared`, it lies beside `output`, where other nodes see
    it."""
    place = output.resolve().parent if shared else None
    with tempfile.TemporaryDirectory(prefix=".hpctrain-probe-", dir=place) as folder:
        yield Path(folder)


@contextmanager
def _rescued(folder: Path, output: Path, people: Console) -> Iterator[None]:
    """Write the rounds measured so far to `output` if the probe is interrupted; the file states their number."""
    try:
        yield
    except (KeyboardInterrupt, HpctrainError):
        partial = folder / PARTIAL_FILE
        if partial.exists():
            topology = Topology.read(partial)
            topology.write(output)
            measured = topology.provenance
            people.print(f"wrote {output}: {measured.rounds_done} of {measured.rounds_planned} rounds", highlight=False)
        raise


def _check_prior(prior: Path, mode: Mode, local: bool) -> None:
    """Check, before a job is queued, that the probe can use the file `prior`.

    Raises:
        InputError: this probe uses no prior, or the file names no switches.
    """
    if local:
        raise InputError("--prior: not with --local, whose virtual nodes have no switches between them")
    if mode != "sampled":
        raise InputError(
            f"--prior: the mode is {mode}, and only sampled asks which switches there are; add --mode sampled"
        )
    if not Topology.read(prior).fabric.clusters:
        raise InputError(f"--prior {prior}: it names no switches (fabric.clusters is empty); give another file or none")


def _check_output(output: Path) -> None:
    """Check, before anything is measured, that `output` can be written.

    Raises:
        InputError: its folder is missing, or may not be written to.
    """
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: there is no folder {output.parent}; make it first")
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"--output {output}: {output.parent} cannot be written; choose another folder")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function to call with (phase, done, total). It shows one line that changes on a terminal, else one plain
    line for each phase."""
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
