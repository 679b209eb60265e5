"""`hpctrain demo`: runs every stage of hpctrain once on this machine, with a line about each stage."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
from rich.text import Text

from hpctrain.base.atomic import storage_errors
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_delta, format_seconds, format_si
from hpctrain.cli.answers import JSON_OPTION, print_json
from hpctrain.cli.commands.train import watch_job
from hpctrain.cli.options.parameters import FOLDER
from hpctrain.cli.views.console import Console, phases
from hpctrain.corpus.prepare.options import Progress
from hpctrain.launch.local import check_gpus
from hpctrain.launch.local_run import LocalJob, start
from hpctrain.launch.predicted_step import predicted_spans
from hpctrain.launch.preflight.prepare import RunInputs, prepare, resolve_run
from hpctrain.launch.probe import probe_local
from hpctrain.launch.starter import Starter, write_starter
from hpctrain.planner import make_plan
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.run_log import MetricRow, last_row_of_each_step, read_metrics
from hpctrain.records.run.run import read_run
from hpctrain.records.topology.topology import Topology
from hpctrain.report.html.render import write_report

NODES = 4
DECODER = Starter(
    name="demo", steps=120, nodes=NODES, lr=2e-3, checkpoint_every=20, text_bytes=12_000_000, tokenizer="train:2048"
)
STARTERS = {"decoder": DECODER, "encoder": replace(DECODER, preset="bert-4m")}
"""Values of the demo's run file, by the value of --model."""
TASKS = {
    "decoder": "The model learns to name the next token.",
    "encoder": "The model learns to fill in tokens that are hidden from it.",
}
MARK = ".hpctrain-demo"
"""Name of the file that marks a folder as made by the demo."""
WORKER_DIES_AT, NODE_DIES_AT = 50, 85
"""Steps after which the demo kills a worker and, later, a whole node."""


@click.command()
@click.option("-o", "--output", type=FOLDER, default=Path("demo"), help="Folder for everything that the demo writes.")
@click.option("--model", type=click.Choice(list(STARTERS)), default="decoder", help="What is trained.")
@JSON_OPTION
def demo_command(output: Path, model: str, as_json: bool) -> None:
    """Run everything once on this machine: no Slurm, no root, under 3 minutes.

    Text found on this machine is tokenized; four virtual nodes are measured; a plan is made; a Transformer trains by
    that plan; a worker is killed, then a whole node; training recovers from both; a report is written.
    """
    click.get_current_context().with_resource(owner_only())
    began = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        folder = _own_folder(output.resolve())
        run_file = _text(folder, STARTERS[model])
        topology = _probe(folder)
        _plan(folder, run_file, topology)
        run_folder = _train(folder, run_file, TASKS[model])
        seconds = time.monotonic() - began
        report = _report(run_folder, seconds, STARTERS[model].preset)
    if as_json:
        paths = {"folder": str(folder), "run_folder": str(run_folder), "report": str(report)}
        print_json({**paths, "seconds": seconds})


def _own_folder(folder: Path) -> Path:
    """Make the demo's folder with the file `MARK`, which marks it as made by the demo, and return its path.

    Raises:
        InputError: the folder holds files, but not the file `MARK`. A demo overwrites only a demo's files.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise InputError(f"{folder}: holds something that the demo did not make; give it a new folder with -o")
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    return folder


def _styled(text: str, style: str) -> None:
    # Lines are not wrapped, so that a path can be copied in one piece.
    Console().print(Text(text, style=style), soft_wrap=True)


def _say(number: int, title: str, why: str) -> None:
    _styled(f"\n{number}/5 {title}", "bold")
    click.echo(f"    {why}")


def _text(folder: Path, starter: Starter) -> Path:
    _say(1, "Text to tokens", "Training text is looked for on this machine; a tokenizer is trained on it.")
    run_file = folder / "run.yaml"
    with phases() as progress:
        started = write_starter(run_file, starter, with_data=True, force=True, progress=_quietly(progress))
    click.echo(f"    {started.text_source}")
    if started.index is not None:
        tokens = sum(shard.tokens for shard in started.index.shards)
        click.echo(f"    {format_si(tokens, 'tokens')}, vocabulary {started.index.vocab_size}: {folder}/data")
    return run_file


def _quietly(progress: Progress) -> Progress:
    """Return `progress` if stderr is a terminal, else a function that shows nothing, so that a demo's log has no
    progress lines."""
    return progress if sys.stderr.isatty() else lambda phase, done, total: None


def _probe(folder: Path) -> Topology:
    _say(2, f"Probe {NODES} virtual nodes", "Each pair measures its link, each device its speed, as on a cluster.")
    for line in check_gpus(NODES, "auto", os.environ):
        click.echo(f"    {line}")
    with tempfile.TemporaryDirectory(prefix="hpctrain-probe-") as scratch:
        topology = probe_local(NODES, Path(scratch), SystemRunner(), SystemClock())
    topology.write(folder / "topology.json")
    for node in topology.nodes:
        for device in node.devices:
            speed = " ".join(f"{dtype} {format_si(value, 'FLOP/s')}" for dtype, value in sorted(device.flops.items()))
            click.echo(f"    {DeviceId.of(node.id, device.id)}  {speed}")
    for entry in topology.fabric.classes:
        rate = format_si(1 / entry.beta_s_per_byte, "B/s") if entry.beta_s_per_byte else "no limit seen"
        click.echo(f"    links ({entry.pairs} pairs): start-up {format_seconds(entry.alpha_s)}, then {rate}")
    click.echo(f"    verdict: {topology.verdict.status}; all figures: {folder}/topology.json")
    return topology


def _plan(folder: Path, run_file: Path, topology: Topology) -> None:
    _say(3, "Plan", "Every way to cut and copy the model is costed on the measured figures; the fastest wins.")
    run, spec = resolve_run(read_run(run_file), SystemRunner())
    plan = make_plan(run, spec, topology)
    plan.stamped().write(folder / "plan.json")
    degrees = f"{plan.dims}, schedule {plan.schedule}"
    click.echo(f"    {spec.parameters():,} parameters: {degrees}")
    if plan.predicted is not None:
        click.echo(f"    predicted step time {format_seconds(plan.predicted.step_time_s['total'])}")
    for rejected in plan.rejected[:3]:
        slower = format_delta(rejected.delta_s) if rejected.delta_s is not None else "cannot run"
        click.echo(f"    not {rejected.change}: {slower}, {rejected.reason}")


def _train(folder: Path, run_file: Path, task: str) -> Path:
    _say(4, "Train, and lose a worker and a node", task)
    click.echo("    SIGKILL, no warning: the agents end the generation and start the next.")
    given = RunInputs(run_file, (), folder / "topology.json", folder / "plan.json")
    prepared = prepare(given, SystemRunner(), NODES)
    job = start(prepared, folder / "runs", SystemRunner(), SystemClock())
    ended = watch_job(job, prepared.run.steps, sys.stdout, _FaultInjector(job).see)
    if ended.exit_code != 0:
        raise HpctrainError(f"the run ended early: {ended.reason}; its logs are in {job.folder.path}/logs")
    return job.folder.path


@dataclass
class _FaultInjector:
    """Kills a worker after step `WORKER_DIES_AT` of the demo's run, and a virtual node after step `NODE_DIES_AT`."""

    job: LocalJob
    done: set[str] = field(default_factory=set)
    """What was killed so far: 'worker', 'node'."""

    def see(self, row: MetricRow) -> None:
        if row.step >= WORKER_DIES_AT and "worker" not in self.done:
            self.done.add("worker")
            _styled("--- the demo kills the worker of local2 (SIGKILL)", "yellow")
            self.job.kill_workers("local2")
        if row.step >= NODE_DIES_AT and "node" not in self.done:
            self.done.add("node")
            _styled("--- the demo kills node local1: agent and worker (SIGKILL)", "yellow")
            self.job.processes["local1"].kill()


def _report(run_folder: Path, seconds: float, preset: str) -> Path:
    """Write the report of the demo's run and say where it is; return its path."""
    report = run_folder / "report.html"
    _say(5, "Report", "Loss, throughput, the measured network, the plan and the recoveries in one file.")
    rows = last_row_of_each_step(read_metrics(run_folder / "metrics.jsonl"))
    click.echo(f"    loss {rows[0].loss:.3f} -> {rows[-1].loss:.3f} in {len(rows)} steps, none missing")
    write_report(run_folder, report, SystemClock().wall(), predicted_spans)
    base = run_folder.parent.parent
    _styled(f"\nDone in {format_seconds(seconds)}. Open {report}", "bold")
    click.echo("Next: change something in the plan by hand, and train by it:")
    click.echo(f"    hpctrain train {base}/run.yaml --topology {base}/topology.json --plan {base}/plan.json")
    click.echo("or write a run file of your own:")
    click.echo(f"    hpctrain init --preset {preset}")
    return report
