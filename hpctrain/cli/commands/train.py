"""`hpctrain train`: train as local processes, and show the progress on the terminal.

`hpctrain demo` runs every stage of hpctrain once on this machine, with a line about each stage.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import click
import psutil
from rich.text import Text

from hpctrain.base.atomic import storage_errors
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_DONE, HpctrainError, InputError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import WORKER_NAME, SystemRunner
from hpctrain.base.units import format_delta, format_seconds, format_si
from hpctrain.cli.answers import warn
from hpctrain.cli.options.given_topology import warn_if_stale
from hpctrain.cli.options.parameters import FOLDER, PATH, RUN, set_option
from hpctrain.cli.options.starting import profile_option, traces_line, with_profile
from hpctrain.cli.run_history import add_to_history
from hpctrain.cli.views.console import Console, phases
from hpctrain.corpus.prepare.options import Progress
from hpctrain.hf.folder import dropout_warning
from hpctrain.launch.local import check_gpus, local_nodes
from hpctrain.launch.local_run import LocalJob, LocalJobResult, ResumedRun, check_resumed, resume, start
from hpctrain.launch.preflight.changed_settings import changes_text
from hpctrain.launch.preflight.prepare import PreparedRun, RunInputs, prepare, resolve_run, runs_folder
from hpctrain.launch.preflight.site import login_node_words
from hpctrain.launch.probe import probe_local
from hpctrain.launch.starter import Starter, write_starter
from hpctrain.launch.stop_signals import stop_signals
from hpctrain.planner import make_plan
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.run_log import Event, MetricRow, last_row_of_each_step, read_metrics
from hpctrain.records.run.run import Run, read_run, run_of
from hpctrain.records.topology.topology import Topology
from hpctrain.report.live_run import follow
from hpctrain.report.render import write_report
from hpctrain.report.terminal import live_lines, show
from hpctrain.runs.code_copy import omitted_secrets_text
from hpctrain.runs.file_system import checkpoint_space_warning
from hpctrain.runs.folder import resume_text
from hpctrain.slurm.commands import Slurm


@click.command()
@click.argument("run_file", required=False, type=PATH, metavar="[RUN.YAML]")
@click.option("--local", "count", type=click.IntRange(min=1), help="Number of virtual nodes. Default: cluster.nodes.")
@click.option("-t", "--topology", type=PATH, help="Topology file. Default: probe first.")
@click.option("-p", "--plan", type=PATH, help="Plan file, obeyed to the letter. Default: plan.")
@click.option("--resume", "run", metavar="RUN", type=RUN, help="Go on with a run, on any number of nodes.")
@click.option("--from-seed", is_flag=True, help="With --resume: begin again; checkpoints that are there are put aside.")
@set_option
@profile_option
@click.option("--json", "as_json", is_flag=True, help="Print the run's name and folder as JSON when it has ended.")
@click.option("--dry-run", is_flag=True, help="Check everything and say what would run.")
def train_command(
    run_file: Path | None, count: int | None, topology: Path | None, plan: Path | None, run: Path | None,
    from_seed: bool, overrides: tuple[str, ...], profile: int | None, as_json: bool, dry_run: bool
) -> None:  # fmt: skip
    """Train as local processes: N virtual nodes, each with an agent and its share of the machine: of its GPUs, with
    a worker for each, or, if there are fewer GPUs than nodes, of its cores, with one worker.

    Ctrl-C saves a checkpoint and stops; a second Ctrl-C ends everything at once.
    """
    click.get_current_context().with_resource(owner_only())
    overrides = with_profile(overrides, profile)
    if (run_file is None) == (run is None):
        raise InputError("give a run file to start, or --resume RUN to go on with one")
    if from_seed and run is None:
        raise InputError("--from-seed: a new run begins from the seed anyway; it belongs to --resume RUN")
    if run is not None:
        if topology or plan:
            raise InputError("--resume takes its topology and plan from the run folder; leave out -t and -p")
        if dry_run:
            going = check_resumed(run, count, overrides, SystemRunner(), from_seed)
            warn(_machine_warnings(going.run, going.count))
            click.echo(_would_resume(going), err=as_json)
            return
        job = resume(run, count, overrides, SystemRunner(), SystemClock(), from_seed)
        warn(_machine_warnings(run_of(job.folder.path), len(job.processes)))
    else:
        assert run_file is not None, "checked above"
        prepared = prepare(RunInputs(run_file, overrides, topology, plan), SystemRunner(), count)
        warn_if_stale(prepared.topology, prepared.nodes)
        warn(_machine_warnings(prepared.run, len(prepared.nodes)))
        if dry_run:
            click.echo(_would_do(prepared), err=as_json)
            return
        job = start(prepared, runs_folder(), SystemRunner(), SystemClock())
        space = checkpoint_space_warning(prepared.run, prepared.spec, runs_folder(), prepared.plan)
        warn([*space, *dropout_warning(prepared.run), *omitted_secrets_text(job.folder.path)])
    _watch(job, as_json)


def _machine_warnings(run: Run, count: int) -> list[str]:
    """Return what somebody should know of a run of `count` virtual nodes on this machine, as lines."""
    few_gpus = check_gpus(count, run.cluster.device, os.environ)
    return [*few_gpus, *login_node_words(count, Slurm(SystemRunner()), os.environ)]


def _watch(job: LocalJob, as_json: bool) -> None:
    folder = job.folder.path
    run = run_of(folder)
    out = sys.stderr if as_json else sys.stdout
    print(f"run folder {folder}", file=out, flush=True)
    add_to_history("train", folder, None)
    ended = watch_job(job, run.steps, out)
    traces = traces_line(run, folder)
    if traces is not None:
        print(traces, file=out)
    if as_json:
        click.echo(json.dumps({"name": folder.name, "folder": str(folder), "exit_code": ended.exit_code}))
    if ended.exit_code == EXIT_DONE:
        print(f"done: {ended.reason}; `hpctrain report {folder}` shows the run", file=out)
        return
    if ended.stopped:
        warn([f"{ended.reason}; go on with `hpctrain train --resume {folder}`"])
    else:
        warn([ended.reason, f"the logs are in {folder}/logs/{job.attempt}"])
    sys.exit(ended.exit_code)


def _would_resume(going: ResumedRun) -> str:
    saved = resume_text(going.path)
    lines = [
        f"would go on with {going.path.name} to step {going.run.steps}; {saved}",
        f"  nodes     {', '.join(local_nodes(going.count))}",
        *(f"  change    {line}" for line in changes_text(going.path, going.run)),
    ]
    return "\n".join(lines)


def _would_do(prepared: PreparedRun) -> str:
    run = prepared.run
    spec = prepared.spec
    lines = [
        f"would train {run.name}: {run.steps} steps of {run.batch.global_} × {run.data.seq_len} tokens",
        f"  model     {spec.parameters():,} parameters, {spec.layers} blocks, vocabulary {spec.vocab}",
        f"  nodes     {', '.join(prepared.nodes)}",
        f"  topology  {'as given' if prepared.topology else 'measured first'}",
        f"  plan      {'as given' if prepared.plan else 'made first'}",
        f"  folder    {runs_folder()}/{run.name}-<time>",
    ]
    return "\n".join(lines)


PLAIN_EVERY_S = 5.0
"""Shortest pause in seconds between two progress lines where lines cannot be rewritten in place."""


def watch_job(
    job: LocalJob, steps: int, out: TextIO, on_row: Callable[[MetricRow], None] | None = None
) -> LocalJobResult:
    """Show metrics and events of a local run until its processes have ended; return how they ended.

    Args:
        steps: number of steps of the run.
        out: stream that shows the lines.
        on_row: called with each new row of metrics.
    """
    clock = SystemClock()
    since = clock.wall()

    def stop() -> None:
        print("\nsaving a checkpoint and stopping; press Ctrl-C again to stop at once", file=out, flush=True)
        job.stop()

    items = follow(job.folder.path, clock, until=lambda: not job.running())
    in_place = out.isatty()
    with stop_signals(stop, job.kill):
        show(live_lines(_new(items, since, on_row), steps, 0.0 if in_place else PLAIN_EVERY_S), out, in_place)
    return job.wait(lambda: None)


def _new(
    items: Iterable[MetricRow | Event], since: float, on_row: Callable[[MetricRow], None] | None
) -> Iterator[MetricRow | Event]:
    """Yield the metrics and events of this attempt, and call `on_row` with each row of metrics.

    Args:
        items: metrics and events from the run folder, which after --resume also holds those of earlier attempts.
        since: start of this attempt, in Unix seconds.
    """
    for item in items:
        if item.time_s < since - 1.0:
            continue
        if on_row is not None and isinstance(item, MetricRow):
            on_row(item)
        yield item


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
def demo_command(output: Path, model: str) -> None:
    """Run everything once on this machine: no Slurm, no root, under 3 minutes.

    Text found on this machine is tokenized; four virtual nodes are measured; a plan is made; a Transformer trains by
    that plan; a worker is killed, then a whole node; training recovers from both; a report is written.
    """
    click.get_current_context().with_resource(owner_only())
    began = time.monotonic()
    folder = _own_folder(output.resolve())
    run_file = _text(folder, STARTERS[model])
    topology = _probe(folder)
    _plan(folder, run_file, topology)
    run_folder = _train(folder, run_file, TASKS[model])
    _report(run_folder, time.monotonic() - began, STARTERS[model].preset)


def _own_folder(folder: Path) -> Path:
    """Make the demo's folder with its mark, and return it.

    Raises:
        InputError: the folder holds files and no mark of an earlier demo. A demo overwrites only a demo's files.
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

    def see(self, row: MetricRow) -> None:
        if row.step >= WORKER_DIES_AT and "worker" not in self.done:
            self.done.add("worker")
            _styled("--- the demo kills the worker of local2 (SIGKILL)", "yellow")
            for child in psutil.Process(self.job.processes["local2"].pid).children():
                if child.name().startswith(WORKER_NAME.format("")):
                    child.kill()
        if row.step >= NODE_DIES_AT and "node" not in self.done:
            self.done.add("node")
            _styled("--- the demo kills node local1: agent and worker (SIGKILL)", "yellow")
            self.job.processes["local1"].kill()


def _report(run_folder: Path, seconds: float, preset: str) -> None:
    _say(5, "Report", "Loss, throughput, the measured network, the plan and the recoveries in one file.")
    rows = last_row_of_each_step(read_metrics(run_folder / "metrics.jsonl"))
    click.echo(f"    loss {rows[0].loss:.3f} -> {rows[-1].loss:.3f} in {len(rows)} steps, none missing")
    try:
        write_report(run_folder, run_folder / "report.html", SystemClock().wall())
        see = f"Open {run_folder}/report.html"
    except InputError as error:  # plotly is not installed; everything else was shown
        click.echo(f"    no report was written: {error}; then `hpctrain report {run_folder}` writes it")
        see = f"`hpctrain status {run_folder}` tells how it went"
    base = run_folder.parent.parent
    _styled(f"\nDone in {format_seconds(seconds)}. {see}", "bold")
    click.echo("Next: change something in the plan by hand, and train by it:")
    click.echo(f"    hpctrain train {base}/run.yaml -t {base}/topology.json -p {base}/plan.json")
    click.echo("or write a run file of your own:")
    click.echo(f"    hpctrain init --preset {preset}")
