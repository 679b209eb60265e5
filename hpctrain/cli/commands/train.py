"""`hpctrain train`: trains as local processes, and shows the progress on the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_DONE, InputError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import warn
from hpctrain.cli.options.given_topology import warn_if_stale
from hpctrain.cli.options.parameters import PATH, RUN, set_option
from hpctrain.cli.options.slurm_options import no_job_options
from hpctrain.cli.options.starting import profile_option, traces_line, with_profile
from hpctrain.hf.folder import hf_warnings
from hpctrain.launch.local import check_gpus, local_nodes
from hpctrain.launch.local_run import LocalJob, LocalJobResult, ResumedRun, check_resumed, resume, start
from hpctrain.launch.preflight.changed_settings import changes_text
from hpctrain.launch.preflight.prepare import PreparedRun, RunInputs, prepare, runs_folder
from hpctrain.launch.preflight.site import login_node_words
from hpctrain.launch.stop_signals import stop_signals
from hpctrain.records.history.run_log import Event, MetricRow
from hpctrain.records.run.run import Run, run_of
from hpctrain.report.live_run import follow
from hpctrain.report.terminal import live_lines, show
from hpctrain.runs.code_copy import omitted_secrets_text
from hpctrain.runs.file_system import checkpoint_space_warning
from hpctrain.runs.folder import resume_text
from hpctrain.runs.started_runs import add_to_history
from hpctrain.slurm.commands import Slurm


@click.command()
@click.argument("run_file", required=False, type=PATH, metavar="[RUN.YAML]")
@click.option("--local", "count", type=click.IntRange(min=1), help="Number of virtual nodes. Default: cluster.nodes.")
@click.option("--topology", type=PATH, help="Topology file. Default: probe first.")
@click.option("--plan", type=PATH, help="Plan file, obeyed to the letter. Default: plan.")
@no_job_options
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
    """Train as local processes: N virtual nodes, each with an agent and its share of this machine's GPUs, with a worker
    for each GPU. With fewer GPUs than nodes, all train on CPUs: each node has its share of the cores, and one worker.

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
            raise InputError(
                "--resume takes its topology and plan from the run folder; leave out --topology and --plan"
            )
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
        warn([*space, *hf_warnings(prepared.run), *omitted_secrets_text(job.folder.path)])
    _watch(job, as_json)


def _machine_warnings(run: Run, count: int) -> list[str]:
    """Return warnings about a run of `count` virtual nodes on this machine, as lines: too few GPUs, or a login node;
    [] if there is nothing to warn of."""
    few_gpus = check_gpus(count, run.cluster.device, os.environ)
    return [*few_gpus, *login_node_words(count, Slurm(SystemRunner()), os.environ)]


def _watch(job: LocalJob, as_json: bool) -> None:
    folder = job.folder.path
    run = run_of(folder)
    out = sys.stderr if as_json else sys.stdout
    print(f"run folder {folder}", file=out, flush=True)
    warn(add_to_history("train", folder, None))
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

    Raises:
        FileError, UntrustedError: a file of the run is damaged or untrusted.
        StorageError: attempts.jsonl cannot be written.
    """
    clock = SystemClock()
    # After --resume, the run's files also hold earlier attempts.
    since_s = clock.wall() - 1.0

    def stop() -> None:
        print("\nsaving a checkpoint and stopping; press Ctrl-C again to stop at once", file=out, flush=True)
        job.stop()

    items = follow(job.folder.path, clock, until=lambda: not job.running(), since_s=since_s)
    in_place = out.isatty()
    with stop_signals(stop, job.kill):
        show(live_lines(_seen(items, on_row), steps, 0.0 if in_place else PLAIN_EVERY_S), out, in_place)
    return job.wait(lambda: None)


def _seen(
    items: Iterable[MetricRow | Event], on_row: Callable[[MetricRow], None] | None
) -> Iterator[MetricRow | Event]:
    """Yield `items`, and call `on_row` with each row of metrics."""
    for item in items:
        if on_row is not None and isinstance(item, MetricRow):
            on_row(item)
        yield item
