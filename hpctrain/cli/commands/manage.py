"""Commands that act on runs: `cancel` stops a run, `exec` runs a command on a node of a run, `prune` removes old
runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError, HpctrainError, InputError, RefusedError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_bytes
from hpctrain.cli.answers import JSON_OPTION, print_json
from hpctrain.cli.options.parameters import RUN, RUNS
from hpctrain.jobs.run_status import run_status
from hpctrain.launch.cancel import cancel_run, cancel_runs
from hpctrain.launch.container_command import container_command, step_options
from hpctrain.launch.step import (
    choose_node,
    local_step_environment,
    next_step_hint,
    nodes_of_attempt,
    step_command,
    step_environment,
)
from hpctrain.records.run.run import Run, run_of
from hpctrain.report.status import RunStatus
from hpctrain.runs.folder import RunFolder, check_trusted, lock_holder
from hpctrain.runs.locate import job_id, run_name, scan_runs
from hpctrain.runs.prune import Removal, jobs_of, removable, remove_all, why_in_use
from hpctrain.runs.sweeps import NamedRuns, find_runs, remove_empty_sweeps
from hpctrain.slurm.commands import Slurm


@click.command()
@click.argument("named", metavar="RUN|SWEEP", type=RUNS)
@click.option(
    "--now", "at_once", is_flag=True, help="Do not wait for a save: steps since the last checkpoint may be lost."
)
@JSON_OPTION
def cancel_command(named: NamedRuns, at_once: bool, as_json: bool) -> None:
    """Stop a run or a sweep for good: agents save a checkpoint and stop, then the job is cancelled.

    RUN is a run folder, a run's name or a job's id. A run that waits in the queue is taken out of the queue. `hpctrain
    resubmit` continues a cancelled run later, from its newest checkpoint. SWEEP is the name or the folder of a sweep,
    or the id of its job array: all its runs are stopped. A run of a sweep is stopped alone by its own name or by its
    job's id, such as 123_4.
    """
    click.get_current_context().with_resource(owner_only())
    if not named.is_sweep:
        text = cancel_run(named.folder, at_once, SystemRunner(), SystemClock())
        print_json({"runs": [_cancelled(named.folder, text)]}) if as_json else click.echo(text)
        return
    results = cancel_runs(named.runs, at_once, SystemRunner(), SystemClock())
    if as_json:
        print_json({"runs": [_cancelled(folder, result) for folder, result in results]})
    for folder, result in results:
        if not isinstance(result, HpctrainError) and not as_json:
            click.echo(f"{folder.name}: {result}")
    failed = [result for _, result in results if isinstance(result, HpctrainError)]
    if failed:
        raise CommandError("\n".join(map(str, failed)))


def _cancelled(folder: Path, result: str | HpctrainError) -> dict[str, object]:
    """Return the JSON object of a run that was cancelled, or of which `result` is the error."""
    failed = isinstance(result, HpctrainError)
    return {"name": run_name(folder.name), "folder": str(folder), "cancelled": not failed, "reason": str(result)}


COMMAND = "hpctrain.exec.command"


class PassThroughCommand(click.Command):
    """A click command that does not parse the words after the first `--`, not even options or another `--`.

    The words are in `ctx.meta[COMMAND]`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours, behind = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        ctx.meta[COMMAND] = behind
        return super().parse_args(ctx, ours)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- CMD..."]


@click.command("exec", cls=PassThroughCommand)
@click.argument("folder", metavar="RUN", type=RUN)
@click.argument("node", required=False)
@click.option("--dry-run", is_flag=True, help="Print the command that would run, and run nothing.")
@click.pass_context
def exec_command(ctx: click.Context, folder: Path, node: str | None, dry_run: bool) -> None:
    """Run a command inside a running job, on one of its nodes.

    \b
    hpctrain exec first -- nvidia-smi
    hpctrain exec first node7 -- bash
    hpctrain exec first -- sh -c 'py-spy dump --pid $(pgrep ^rank | head -1)'

    RUN is a run folder, a run's name or a job's id. NODE is one of the job's nodes; the default is the first node of
    the attempt that still takes part. The command shares the node with the training, gets a terminal if you have one,
    and its exit code is returned. The shell commands of cluster.setup run before the command; the run's copy of your
    code is on PYTHONPATH, and HPCTRAIN_RUN_FOLDER and HPCTRAIN_ATTEMPT are set. For a local run the command runs on
    this machine.
    """
    words = ctx.meta[COMMAND]
    if not words:
        raise InputError("no command: write it behind `--`, as in `hpctrain exec RUN -- nvidia-smi`")
    folder = folder.resolve()
    check_trusted(folder)
    spec = run_of(folder)
    status = run_status(folder)
    find = _in_job if spec.cluster.kind == "slurm" else _here
    argv, env = find(folder, spec, status, node, words)
    if dry_run:
        click.echo(shlex.join(argv))
        return
    SystemRunner().replace_process(argv, env)


def _in_job(
    folder: Path, run: Run, status: RunStatus, node: str | None, words: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Return argv and environment with which a command runs as a job step of the run's job.

    Args:
        node: node of the job; None: the first that still takes part in the attempt.
        words: the command.

    Raises:
        RefusedError: the job does not run.
        InputError: the named node is not one of the job's nodes.
    """
    attempts = RunFolder(folder).attempts()
    job = job_id(folder)
    slurm = Slurm(SystemRunner())
    info = slurm.job(job) if job is not None else None
    if job is None or info is None or info.state != "RUNNING":
        raise _not_running(folder, status)
    chosen = choose_node(node, nodes_of_attempt(attempts), status.nodes, info.nodes)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    inside = container_command(run, folder, words, with_code=True)
    argv = step_command(slurm.number(job), chosen, run.cluster.setup, inside, terminal, step_options(run, folder))
    return argv, step_environment(folder, status.attempt, os.environ)


def _here(
    folder: Path, run: Run, status: RunStatus, node: str | None, words: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Return argv and environment with which a command runs on this machine, where all virtual nodes of a local run
    are.

    Args:
        node: the virtual node that the user named, which must be one of the attempt and changes nothing else; None if
            the user named none.
        words: the command.

    Raises:
        RefusedError: the run is not running, or runs on another machine.
        InputError: the named node is not one of the attempt's nodes.
    """
    holder = lock_holder(folder)
    if holder is None:
        raise _not_running(folder, status)
    if not holder.is_here:
        raise RefusedError(f"{folder.name}: {holder} holds it; use `hpctrain exec {folder.name}` on that machine")
    nodes = nodes_of_attempt(RunFolder(folder).attempts())
    if nodes:
        choose_node(node, nodes, status.nodes, nodes)
    return container_command(run, folder, words, with_code=True), local_step_environment(
        folder, status.attempt, max(1, len(nodes)), os.environ
    )


def _not_running(folder: Path, status: RunStatus) -> RefusedError:
    return RefusedError(
        f"{folder.name}: it is {status.state} ({status.reason}); {next_step_hint(status.state, folder.name)}"
    )


UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@click.command()
@click.argument("runs", nargs=-1)
@click.option("--older-than", metavar="AGE", help="Whole runs without a sign of life for AGE too: 12h, 30d, 8w.")
@click.option(
    "--keep-checkpoints",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Newest verified checkpoints to keep of each run.",
)
@click.option("--yes", is_flag=True, help="Remove what is listed. Default: only list it.")
@click.option("--json", "as_json", is_flag=True, help="Print {removed, size_bytes, items, kept} on stdout.")
def prune_command(
    runs: tuple[str, ...], older_than: str | None, keep_checkpoints: int, yes: bool, as_json: bool
) -> None:
    """List what old runs and checkpoints would free; remove it with --yes.

    RUNS are run folders, names or job ids, also of sweeps; default: all runs in ./runs and in $HPCTRAIN_RUNS. Of each
    run, all checkpoints but the newest verified one (or N, by --keep-checkpoints) are listed, and unfinished files of
    killed writers. With --older-than, old runs are listed as a whole, with their last checkpoint (`hpctrain prune RUN
    --older-than 0h --yes` removes that run).

    A run that may be alive is never touched: a process holds its folder, its job is in the queue (or Slurm cannot say),
    or its files changed in the last 15 minutes.
    """
    age_s = _seconds(older_than) if older_than is not None else None
    cwd = Path.cwd()
    named = [folder for run in runs for folder in find_runs(run, os.environ, cwd).runs]
    folders = list(dict.fromkeys(folder.resolve() for folder in named or scan_runs(os.environ, cwd).trusted))
    slurm, now = Slurm(SystemRunner()), SystemClock().wall
    jobs, items, spared = jobs_of(folders, slurm), list[Removal](), list[str]()
    for folder in folders:
        words = why_in_use(folder, jobs, now())
        if words is not None:
            spared.append(f"{folder}: {words}")
        else:
            items += removable(folder, now(), age_s, keep_checkpoints)
    if not as_json:
        _list(items, spared)
    if yes:
        refused = remove_all(items, lambda folder: jobs_of([folder], slurm), now)
        spared += refused
        for line in refused:
            click.echo(f"left alone after all: {line}", err=True)
        items = [item for item in items if not item.path.exists()]
        emptied = remove_empty_sweeps(item.path.parent for item in items if item.kind == "run")
        if not as_json:
            for sweep in emptied:
                click.echo(f"removed the folder of the sweep too, as none of its runs is left: {sweep}")
    if as_json:
        click.echo(json.dumps(_machine_form(items, spared, yes)))
    elif items:
        total = format_bytes(sum(item.size_bytes for item in items))
        click.echo(f"{total} removed" if yes else f"{total} would be free; nothing was removed, --yes does it")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text.strip())
    if match is None:
        raise InputError(f"--older-than: found '{text}'; allowed: hours, days or weeks, as in 12h, 30d, 8w")
    return float(match[1]) * UNITS_S[match[2]]


def _list(items: list[Removal], spared: list[str]) -> None:
    for line in spared:
        click.echo(f"left alone: {line}")
    if not items:
        click.echo("nothing to prune")
        return
    for item in items:
        click.echo(f"{format_bytes(item.size_bytes):>10}  {item.kind:<10}  {item.path}  ({item.why})")


def _machine_form(items: list[Removal], spared: list[str], yes: bool) -> dict[str, object]:
    rows = [
        {"kind": item.kind, "path": str(item.path), "size_bytes": item.size_bytes, "why": item.why} for item in items
    ]
    return {"removed": yes, "size_bytes": sum(item.size_bytes for item in items), "items": rows, "kept": spared}
