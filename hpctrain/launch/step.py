"""Makes the argv and the environment with which `hpctrain exec` runs a command beside the training, as one more step of
a running job. All functions are pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.launch.local import local_environment
from hpctrain.runs.code_copy import code_on_path
from hpctrain.slurm.commands import client_environment


def choose_node(asked: str | None, attempt: Sequence[str], members: Sequence[str], job: Sequence[str]) -> str:
    """Return the node on which `hpctrain exec` runs its command.

    Args:
        asked: the node that the user named; None: the first node of the attempt that is still a member.
        attempt: nodes that the attempt started with.
        members: nodes of the run's newest generation. A lost node stays in the job, and srun would wait for it forever.
        job: nodes that the job has now.

    Raises:
        InputError: the named node is not one of the job's nodes.
    """
    if asked is not None and asked not in job:
        raise InputError(f"node: found '{asked}'; allowed: {', '.join(job)}")
    if asked is not None:
        return asked
    wanted = [[name for name in attempt if name in members], attempt, job]
    return next(name for names in wanted for name in names if name in job)


def step_command(
    job_id: str, node: str, setup: Sequence[str], command: Sequence[str], terminal: bool, options: str = ""
) -> list[str]:
    """Return the argv of an srun that runs `command` in a job step of its own. The step shares CPUs, memory and GPUs
    with the training, which continues.

    Args:
        setup: cluster.setup, so that the command gets the environment modules and variables of the workers.
        options: further options for srun, as a shell reads them.
        terminal: whether the user is at a terminal; then the command gets a pseudo-terminal.
    """
    argv = ["srun", f"--jobid={job_id}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
    # Set the tasks per node: otherwise the --ntasks-per-node=8 of an allocation would also hold for its steps.
    argv += ["--ntasks-per-node=1", "--cpu-bind=none", "--export=ALL", *(["--pty"] if terminal else [])]
    argv += shlex.split(options)
    if setup:
        argv += ["bash", "-c", "\n".join([*setup, 'exec "$@"']), "hpctrain-exec"]
    return [*argv, *command]


def step_environment(folder: Path, attempt: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command in a job of the run in `folder`: the variables of `environ` without those of
    Slurm, and those that describe the run: HPCTRAIN_RUN_FOLDER, HPCTRAIN_ATTEMPT and PYTHONPATH."""
    env = client_environment(environ)
    env.pop("SLURM_TIME_FORMAT")  # set only for output that hpctrain parses
    return env | _run_variables(folder, attempt, environ)


def local_step_environment(folder: Path, attempt: int, count: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command that runs on this machine while a local run of `count` virtual nodes trains:
    `environ` with the variables of a virtual node and those that describe the run."""
    return local_environment(count, environ) | _run_variables(folder, attempt, environ)


def _run_variables(folder: Path, attempt: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that describe the run: its folder, its attempt, and PYTHONPATH of `environ` with the run's
    copy of your code first."""
    variables = {"HPCTRAIN_RUN_FOLDER": str(folder), "HPCTRAIN_ATTEMPT": str(attempt)}
    return variables | code_on_path(folder, environ)


def next_step_hint(state: str, name: str) -> str:
    """Return a sentence with the next hpctrain command for a run in which `hpctrain exec` cannot run anything now.

    Args:
        state: state of the run, as `hpctrain status` gives it.
        name: name of the run.
    """
    if state in ("queued", "requeued", "starting"):
        return f"wait until it runs: `hpctrain status {name}`"
    if state == "done":
        return f"`hpctrain report {name}` shows it"
    return f"`hpctrain logs {name}` shows why, `hpctrain resubmit {name}` goes on with it"


def nodes_of_attempt(attempts: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the nodes that the newest attempt started with; [] before the first attempt.

    Args:
        attempts: lines of attempts.jsonl.
    """
    nodes = attempts[-1].get("nodes") if attempts else None
    return [str(node) for node in nodes] if isinstance(nodes, list) else []
