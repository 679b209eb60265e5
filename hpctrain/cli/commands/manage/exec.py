"""`hpctrain exec RUN [NODE] -- CMD…`: run a command beside a run, on one of its nodes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.options.run_and_paths import RUN
from hpctrain.cli.views.run_status import run_status
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
from hpctrain.runs.locate import job_id
from hpctrain.slurm.commands import Slurm

COMMAND = "hpctrain.exec.command"


class PassThroughCommand(click.Command):
    """A click command that passes on all words after the first `--` unparsed, even options and another `--`."""

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
def command(ctx: click.Context, folder: Path, node: str | None, dry_run: bool) -> None:
    """Run a command inside a running job, on one of its nodes.

    \b
    hpctrain exec first -- nvidia-smi
    hpctrain exec first node7 -- bash
    hpctrain exec first -- sh -c 'py-spy dump --pid $(pgrep ^rank | head -1)'

    RUN is a run folder, a run's name or a job's id. NODE is one of the job's nodes; the default is the first node of
    the attempt that still takes part. The command shares the node with the training, gets a terminal if you have one,
    and its exit code is returned. It starts with cluster.setup, with the run's copy of your code on PYTHONPATH, and
    with HPCTRAIN_RUN_FOLDER and HPCTRAIN_ATTEMPT set. For a local run the command runs on this machine.
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
    """Return argv and environment that run the command as a step of the run's job."""
    attempts = RunFolder(folder).attempts()
    job = job_id(folder)
    info = Slurm(SystemRunner()).job(job) if job is not None else None
    if job is None or info is None or info.state.value != "RUNNING":
        raise _not_running(folder, status)
    chosen = choose_node(node, nodes_of_attempt(attempts), status.nodes, info.nodes)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    inside = container_command(run, folder, words, with_code=True)
    argv = step_command(job, chosen, run.cluster.setup, inside, terminal, step_options(run, folder))
    return argv, step_environment(folder, status.attempt, os.environ)


def _here(
    folder: Path, run: Run, status: RunStatus, node: str | None, words: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Return argv and environment that run the command on this machine, where all virtual nodes run."""
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
