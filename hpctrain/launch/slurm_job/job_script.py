"""Makes the text of a run's job script: #SBATCH lines from the run file, all other lines from slurm/run.sbatch.j2.

A run inside an allocation (salloc) or a batch job that a person already has executes its job script there, instead of
submitting it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from hpctrain import __version__
from hpctrain.base.atomic import write_text
from hpctrain.base.clock import Clock, utc_text
from hpctrain.base.errors import InputError
from hpctrain.base.module_argv import program
from hpctrain.base.output_streams import first_control_character
from hpctrain.base.package_data import package_data_path, render_template
from hpctrain.base.process import Runner
from hpctrain.jobs.dependencies import dependency_option
from hpctrain.jobs.successors import CANCELLED_FILE
from hpctrain.launch.container_command import (
    TRACKER_LOG,
    python_command,
    step_options,
    task_command,
    tracker_command,
)
from hpctrain.launch.stop_signals import stop_signals
from hpctrain.records.run.run import Run
from hpctrain.runs.folder import RunFolder, check_path
from hpctrain.runs.locate import JOB_FILE, job_id, job_of_process, record_job
from hpctrain.slurm.cluster import constraint_of_groups
from hpctrain.slurm.options import parse_sbatch_option

DIRECTIVES_SET_HERE = (
    "nodes", "ntasks", "ntasks-per-node", "requeue", "no-requeue", "no-kill", "open-mode", "output", "error", "signal",
    "array", "job-name", "cluster", "clusters", "wrap", "test-only", "parsable", "wait",
)  # fmt: skip
"""Options of sbatch that hpctrain sets, or that change how a job runs. With other values recovery would break, so
cluster.sbatch may not contain them."""

DIRECTIVES_OF_RUN_FILE = {
    "partition": "write cluster.partition",
    "account": "write cluster.account",
    "qos": "write cluster.qos",
    "time": "write cluster.time",
    "gpus-per-node": "write cluster.devices_per_node, and cluster.gpu_type for GPUs of one type",
    "constraint": "write cluster.constraint",
    "exclusive": "write cluster.exclusive: true",
    "reservation": "write cluster.reservation",
    "nodelist": "write cluster.nodelist",
    "exclude": "write cluster.exclude",
    "dependency": "write cluster.after",
    "mail-type": "write cluster.mail",
    "mail-user": "write cluster.mail",
    "export": "it would keep the job's own variables from its tasks; set yours in cluster.setup: export NAME=value",
}
"""Options of sbatch that have a key in the run file, with the advice to use it: values of keys are checked, those in
cluster.sbatch are not."""


SHARED_NODE_OPTIONS = ("exclusive", "oversubscribe", "share")
"""Options of sbatch that let other jobs onto the job's nodes; --exclusive does so with a value, as in --exclusive=user.
The last of these options and hpctrain's own --exclusive counts. A job that shares its nodes and names no number of CPUs
gets one CPU of each node."""


def render_job(run: Run, folder: Path, command: str, submitted: bool = True, by_hand: bool = False) -> str:
    """Return the text of the run's job script, the file job.sh.

    Args:
        run: the run, with job ids in `cluster.after`.
        folder: the run folder, absolute and shared by all nodes.
        command: what each node's task executes (a shell command, quoted already).
        submitted: whether the script belongs to a batch job of the run; otherwise it runs in a person's allocation.
        by_hand: whether a person submitted the batch job with another script, which has the #SBATCH lines.

    Raises:
        InputError: cluster.sbatch, cluster.setup or the folder's path holds what cannot go into the script, or with
            pyxis a path cannot be bound into the image.
    """
    check_path(folder)
    # hpctrain does not have the script of a job that a person submitted, so that job is requeued, not submitted anew.
    again = None if not submitted else "same_job" if by_hand else run.recovery.requeue
    return render_template(
        package_data_path("slurm", "run.sbatch.j2"),
        name=run.name,
        version=__version__,
        how="runs in the job" if by_hand else "was submitted" if submitted else "runs in the allocation",
        directives=[] if by_hand else directives(run, folder),
        setup=_checked(run.cluster.setup, "cluster.setup"),
        folder=shlex.quote(str(folder)),
        log_folder=directive_path(folder),
        node=shlex.join(program("hpctrain.node")),
        srun_options=_srun_options(run) + step_options(run, folder),
        offline=not run.cluster.internet,
        gpus=run.cluster.device != "cpu",
        command=command,
        submitted=submitted,
        tracker=shlex.join(tracker_command(folder)) if run.tracking.trackers else "",
        tracker_log=TRACKER_LOG,
        again=again,
        closing=_closing(run, folder, again),
    )


def node_command(folder: Path) -> list[str]:
    """Return the Python module that each node's task runs, followed by its arguments. A task takes its node's name
    from Slurm's environment."""
    return ["hpctrain.node", "run", "--folder", str(folder)]


def direct_command(run: Run, folder: Path) -> str:
    """Return the shell command of each node's task for a job that was not submitted through submitit."""
    module, *words = node_command(folder)
    return task_command(run, folder, [*python_command(run, module), *words])


def directives(run: Run, folder: Path) -> list[str]:
    """Return the options in the #SBATCH lines, one an item, as '--nodes=4'. Those of cluster.sbatch come last, because
    sbatch takes the last of two equal options; the others are sorted.

    Raises:
        InputError: as of `check_options`, or a value holds a line break or another control character.
    """
    cluster = run.cluster
    options = [
        f"--job-name={run.name}",
        f"--nodes={cluster.nodes}",
        # The number of tasks is left out: with it, Slurm gives the fewest nodes of a range even if more are idle.
        *(["--exclusive", "--mem=0"] if cluster.exclusive is not False else []),
        # Successor jobs wait for the end of this job; if it were requeued, they would wait for its second end.
        "--no-requeue" if run.recovery.successors else "--requeue",
        # The job goes on without a node that Slurm gives up. If that is the node of its script, a task has to end it.
        *(["--no-kill"] if _task_may_end_job(run) else []),
        "--open-mode=append",
        f"--output={directive_path(folder)}/logs/%j.job.log",
        f"--signal=USR2@{cluster.save_notice_s}",
    ]
    for option, value in (
        ("partition", cluster.partition), ("account", cluster.account), ("qos", cluster.qos), ("time", cluster.time),
        ("gpus-per-node", _typed_gpus(run)), ("constraint", _constraint(run)), ("reservation", cluster.reservation),
        ("nodelist", cluster.nodelist), ("exclude", cluster.exclude),
        ("dependency", dependency_option(cluster.after, cluster.after_end)),
        # Some sites cancel a job whose dependency failed. But the run that this job waits for may continue as another
        # job.
        ("kill-on-invalid-dep", "no" if cluster.after else None),
        ("mail-type", ",".join(cluster.mail.on) if cluster.mail else None),
        ("mail-user", cluster.mail.user if cluster.mail else None),
    ):  # fmt: skip
        if value is not None:
            options.append(f"--{option}={shlex.quote(_checked([str(value)], f'--{option}')[0])}")
    check_options(run)
    return sorted(options) + cluster.sbatch


def check_options(run: Run) -> None:
    """Check that cluster.sbatch sets no option that hpctrain sets, or that has a key in the run file, and none that
    lets other jobs onto whole nodes.

    Raises:
        InputError: cluster.sbatch holds such an option, or an item that is not one whole option.
    """
    for option in _checked(run.cluster.sbatch, "cluster.sbatch"):
        try:
            name, value = parse_sbatch_option(option)
        except ValueError as error:
            raise InputError(f"cluster.sbatch: found {option!r}; {error}") from None
        if name in DIRECTIVES_SET_HERE:
            raise InputError(f"cluster.sbatch: --{name} is set by hpctrain; leave it out")
        # With a value, as in --exclusive=user, it does not ask for whole nodes.
        if name in DIRECTIVES_OF_RUN_FILE and not (name == "exclusive" and value):
            raise InputError(f"cluster.sbatch: found --{name}; {DIRECTIVES_OF_RUN_FILE[name]}")
        if name in SHARED_NODE_OPTIONS and run.cluster.exclusive is not False:
            raise InputError(
                f"cluster.sbatch: found {option}, with which a job does not get whole nodes; leave it out, or take a "
                "part of each node with cluster.exclusive: false"
            )


def _checked(lines: list[str], field: str) -> list[str]:
    for line in lines:
        character = first_control_character(line.replace("\t", " "))
        if character in (r"\n", r"\r"):
            raise InputError(f"{field}: {line!r} holds a line break; give one line an item")
        if character is not None:
            raise InputError(f"{field}: {line!r} holds the control character {character}; take it out")
    return lines


def directive_path(folder: Path) -> str:
    """Return the path as it is written in a #SBATCH line: quoted, and with each % doubled, because sbatch replaces %j
    and the like."""
    return shlex.quote(str(folder).replace("%", "%%"))


def _typed_gpus(run: Run) -> str | None:
    count = gpus_per_node(run)
    if count is None:
        return None
    return f"{run.cluster.gpu_type}:{count}" if run.cluster.gpu_type else str(count)


def _constraint(run: Run) -> str | None:
    if run.cluster.groups:
        return constraint_of_groups([(group.constraint, group.nodes) for group in run.cluster.groups])
    return run.cluster.constraint


def gpus_per_node(run: Run) -> int | None:
    """Return the number of GPUs that the job requests on each node; None if it requests none."""
    return run.cluster.devices_per_node if run.cluster.device != "cpu" else None


def _task_may_end_job(run: Run) -> bool:
    """Return whether a task of the job step can call Slurm's commands. With pyxis the whole task is in the image, where
    they may be missing."""
    return run.container is None or run.container.runtime != "pyxis"


def _closing(run: Run, folder: Path, again: str | None) -> str:
    """Return the words that the job script puts before each task's command. They run the command through the shell
    lines in the script's variable $task, so that the tasks keep the job alive, and one of them ends it, if the job
    script was lost with its node. The words are '' where no task may end the job: in a person's allocation, and with
    pyxis.

    Args:
        again: how the run continues after the job, as in `hpctrain.node end --again`; None in a person's allocation.
    """
    if again is None or not _task_may_end_job(run):
        return ""
    python, start, _ = program("hpctrain.node")
    return f'bash -c "$task" {shlex.join([python, start, str(folder), again])} "$log" '


def _srun_options(run: Run) -> str:
    """Return srun's options for the CPUs and GPUs of each job step, with a trailing space.

    Every task sees all GPUs of its node, because a process that sees only some GPUs cannot use the links between GPUs.
    If the run file gives no number of GPUs, the step must name the number that the nodes have, or it gets no GPUs.
    """
    # Since Slurm 22.05, srun does not inherit the job's --cpus-per-task, and each task would run on one CPU.
    cpus = "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} "
    if run.cluster.device == "cpu":
        return cpus
    if gpus_per_node(run):
        return f"{cpus}--gpu-bind=none "
    return cpus + "${SLURM_GPUS_ON_NODE:+--gpus-per-node=$SLURM_GPUS_ON_NODE --gpu-bind=none} "


ALLOCATION = "allocation"
"""File in a run folder that exists while the run uses a person's allocation. With it, `hpctrain cancel` ends the run
and not the allocation."""
STOP_WAIT_S = 90.0
"""Seconds for which `hpctrain cancel` waits until a run in an allocation has saved and stopped."""
POLL_S = 0.5


def run_in_allocation(folder: RunFolder, run: Run, job_id: str, runner: Runner, say: Callable[[str], None]) -> int:
    """Run the run's job script in this process's allocation and wait for its end; return its exit code if that is 0, 2
    or 4, else 1.

    The first Ctrl-C asks the script to save and stop, the second one ends it. This process forwards the signals,
    because the script and srun run in another session, which the terminal's signals do not reach.

    Args:
        job_id: id of the allocation's job.
        say: called at each signal, with a line that says what the signal does.

    Raises:
        StorageError: the run folder cannot be written.
        CommandError: bash cannot be started.
        InputError: as of `render_job`.
    """
    script = folder.path / "job.sh"
    write_text(script, render_job(run, folder.path, direct_command(run, folder.path), submitted=False), mode=0o755)
    marks = [folder.path / name for name in (JOB_FILE, ALLOCATION)]
    try:
        for mark in marks:
            write_text(mark, f"{job_id}\n")
        process = runner.start(["bash", str(script)])

        def stop(text: str) -> None:
            say(text)
            process.terminate()

        with stop_signals(
            lambda: stop("saving a checkpoint and leaving; once more ends it at once"),
            lambda: stop("ending the run at once"),
        ):
            code = process.wait()
    finally:
        # The run has ended, so the allocation's job says nothing about it any more.
        for mark in marks:
            mark.unlink(missing_ok=True)
    return code if code in (0, 2, 4) else 1


def is_in_allocation(folder: Path) -> bool:
    """Return whether the run in `folder` now uses a person's allocation (salloc)."""
    return (folder / ALLOCATION).exists()


def stop_in_allocation(folder: Path, clock: Clock) -> str:
    """Ask a run in a person's allocation to save and stop; return a sentence that says whether it has stopped. The
    allocation stays.

    Raises:
        StorageError: the run folder cannot be written.
    """
    # The script watches for this file. A signal would also reach other steps of the allocation.
    write_text(folder / CANCELLED_FILE, utc_text(clock.wall()) + "\n")
    deadline = clock.now() + STOP_WAIT_S
    while is_in_allocation(folder):
        if clock.now() > deadline:
            return f"asked the run to save and leave; it has not within {STOP_WAIT_S:g} s: see `hpctrain logs`"
        clock.sleep(POLL_S)
    return "the run has left its allocation, which goes on"


def current_batch_job_id(environ: Mapping[str, str]) -> str:
    """Return the id of the batch job whose script this process belongs to.

    Raises:
        InputError: this process is in no batch job.
    """
    job = job_of_process(environ)
    if job is None:
        raise InputError(
            "--own-job: only inside a batch job, as in slurm/train.sbatch; from a login node leave it out, and "
            "hpctrain queues the job itself"
        )
    return job


def is_requeued_job(environ: Mapping[str, str]) -> bool:
    """Return whether this process's job was requeued before, for example after a preemption or the loss of a node."""
    return environ.get("SLURM_RESTART_COUNT", "0") != "0"


def adopt_job(folder: Path, run: Run, job: str) -> list[str]:
    """Record the batch job with id `job` as the newest job of the run in `folder`; write the run's job script, and
    return the argv with which this process becomes the script.

    Raises:
        InputError: as of `render_job`; or the run's list of job ids is untrusted.
        StorageError: the run folder cannot be written.
    """
    script = folder / "job.sh"
    write_text(script, render_job(run, folder, direct_command(run, folder), by_hand=True), mode=0o755)
    if job_id(folder) != job:
        (folder / CANCELLED_FILE).unlink(missing_ok=True)
        record_job(folder, job)
    return ["bash", str(script)]


def check_is_slurm(run: Run) -> None:
    """Check that the run has `cluster.kind: slurm`. With `local`, the run would start its processes on the first
    node of the job only.

    Raises:
        InputError: the run has `cluster.kind: local`.
    """
    if run.cluster.kind != "slurm":
        raise InputError("cluster.kind: found local; a job of its own needs slurm: add --set cluster.kind=slurm")
