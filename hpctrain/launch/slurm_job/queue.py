"""Checks a run before its job is queued, asks Slurm when the job would start, and waits until the run's jobs have
ended."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.clock import Clock, utc_text
from hpctrain.base.errors import CommandError, InputError, RefusedError
from hpctrain.base.units import format_seconds
from hpctrain.jobs.dependencies import JobDependencies, find_dependencies, with_dependencies
from hpctrain.jobs.job_price import JobPrice, job_price
from hpctrain.jobs.node_share import with_node_share
from hpctrain.jobs.partition_checks import (
    can_be_preempted,
    check_time_limit,
    node_groups,
    nodes_of_job,
    preemption_warnings,
    time_limit,
    with_gpu_request,
)
from hpctrain.jobs.wall_time import TimeLimit
from hpctrain.launch.slurm_job.job_script import check_options, gpus_per_node
from hpctrain.records.format.node_name import compress_node_set, expand_node_set
from hpctrain.records.run.run import Run
from hpctrain.runs.file_system import check_shared
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import open_jobs
from hpctrain.slurm.cluster import ClusterState
from hpctrain.slurm.commands import Slurm, StartEstimate
from hpctrain.slurm.job import JobInfo, pending_job_text
from hpctrain.slurm.limits import JobRequest, PartitionFit, check_request, choose_partition
from hpctrain.slurm.values import parse_time_limit
from hpctrain.slurm.watch import JobWatcher

CONTROLLER_AWAY_LIMIT_S = 600.0
"""Seconds for which `hpctrain submit --wait` tolerates a controller that does not answer."""


@dataclass(frozen=True)
class CheckedRun:
    """A run that passed the checks and may be queued."""

    run: Run
    """The run to record: with the chosen partition if the run file names none, and with the folders of the runs that it
    waits for."""
    asked: Run
    """The run with what its job requests from Slurm: like `run`, but with a number of GPUs, with whole nodes or a part
    of each, and with the ids of the jobs that it waits for."""
    lines: list[str]
    """Results of the checks that a person should know, as lines."""
    nodes: frozenset[str] | None
    """Names of the nodes that the job may get; None: unknown."""
    limit: TimeLimit | None
    """The time limit of the job, from the run file or its partition; None: unknown."""
    before: JobDependencies
    """The runs and jobs that the run waits for."""
    price: JobPrice | None = None
    """What the job is billed, and its kinds of GPUs; None: unknown."""
    others: tuple[str, ...] = ()
    """Other partitions that would take the job, the best first, if the run file names none."""

    @property
    def part(self) -> bool:
        """Whether the job asks for a part of each node, not for whole nodes."""
        return self.asked.cluster.exclusive is False


def check_queue(run: Run, slurm: Slurm, runs: Path, environ: Mapping[str, str], cwd: Path) -> CheckedRun:
    """Return the run with the partition and the GPUs that its file leaves open, after checking its request against the
    cluster as it is now.

    Args:
        runs: folder in which run folders are made.
        environ: its variable HPCTRAIN_RUNS names a folder in which the runs in cluster.after are looked up.
        cwd: folder whose subfolder `runs` is searched for the runs in cluster.after too.

    Raises:
        InputError: there is no Slurm here, a value cannot be read, an option is not allowed, the time limit leaves no
            time to train, or the run folder would lie on a file system in this machine's memory.
        RefusedError: the request exceeds the limits of the partition, or of all partitions if none is named; the
            message has every reason. Or a run or job that has to succeed before this run starts has failed.
        CommandError: the controller does not answer, and the run file names runs or jobs for which the run waits.
    """
    why = slurm.why_unavailable()
    if why is not None:
        raise InputError(f"{why}; log in to the cluster, or use `hpctrain train --local N`")
    check_options(run)
    check_time_limit(run)
    try:
        state = slurm.state()
    except CommandError as error:
        away = f"not checked before submitting: partitions, their limits and GPUs ({error})"
        limit = TimeLimit(_request(run).time_s, True) if run.cluster.time is not None else None
        before = find_dependencies(run, slurm, environ, cwd)
        lines = [*check_shared(runs, ()), away, *before.lines]
        return CheckedRun(
            with_dependencies(run, before.names), with_dependencies(run, before.jobs), lines, None, limit, before
        )
    notes = check_shared(runs, [node.name for node in state.nodes])
    others: tuple[str, ...] = ()
    if run.cluster.partition is None:
        run, others, lines = with_partition(run, state)
        notes += lines
    problems = check_request(_request(run), state.partitions, state.nodes)
    if problems:
        raise RefusedError("\n".join(problems))
    check_time_limit(run, state.partitions)
    asked, gpus = with_gpu_request(run, state)
    asked, share = with_node_share(asked, state, run.cluster.devices_per_node)
    limit = TimeLimit(time_limit(run, state.partitions), run.cluster.time is not None)
    before = find_dependencies(run, slurm, environ, cwd)
    lines = [*notes, *preemption_warnings(run, state), *gpus, *share, *before.lines]
    nodes = nodes_of_job(run, state)
    recorded, price = with_dependencies(run, before.names), job_price(asked, state)
    asked = with_dependencies(asked, before.jobs)
    return CheckedRun(recorded, asked, lines, nodes, limit, before, price, others)


def with_partition(run: Run, state: ClusterState) -> tuple[Run, tuple[str, ...], list[str]]:
    """Return the run with the partition that fits best, the names of the other partitions that would take its job, the
    best first, and lines with the reasons.

    Raises:
        RefusedError: no partition takes the job; the message has every partition's reasons.
    """
    best, *others = ranked_partitions(run, state)
    chosen = run.cluster.model_copy(update={"partition": best.partition.name})
    lines = [f"partition {best.partition.name} chosen: {best.words}"]
    if others:
        lines.append(f"next best: {others[0].partition.name}: {others[0].words}; cluster.partition overrides this")
    return run.model_copy(update={"cluster": chosen}), tuple(fit.partition.name for fit in others), lines


def ranked_partitions(run: Run, state: ClusterState) -> list[PartitionFit]:
    """Return the partitions that take the job of a run that names none, the best first (see `choose_partition`); at
    least one.

    Raises:
        RefusedError: no partition takes the job; the message has every partition's reasons.
    """
    kind, request = state.config["preempt_type"], _request(run)
    if run.cluster.device == "cuda" and request.gpus_per_node is None:
        request = replace(request, gpus_per_node=1)
    preemptible = [item.name for item in state.partitions if can_be_preempted(kind, item, state.partitions)]
    ranked, refused = choose_partition(request, state.partitions, state.nodes, preemptible, run.cluster.device != "cpu")
    if not ranked:
        raise RefusedError("\n".join(["cluster.partition: not given, and no partition takes the job:", *refused]))
    return ranked


def wait_for_job(folder: Path, job_id: str, slurm: Slurm, clock: Clock, say: Callable[[str], None]) -> int:
    """Wait until a job of the run has ended and the run is done or all its successors have ended too; return 0 if the
    run is done, else 1.

    Args:
        folder: the run folder.
        job_id: the job to begin with.
        say: called with a line at each change of a job's state.

    Raises:
        CommandError: the controller did not answer for ten minutes.
        FileError, UntrustedError: attempts.jsonl or successors.jsonl is damaged or untrusted.
    """
    watcher, shown, seen = JobWatcher(slurm, [job_id]), "", [job_id]
    while True:
        watcher.poll(clock.now())
        if watcher.all_ended:
            following = [job for job in open_jobs(folder) if job not in seen]
            if not following or _is_done(folder):
                return 0 if _is_done(folder) else 1
            job_id = following[0]
            seen.append(job_id)
            watcher.add(job_id)
            continue
        if watcher.away is not None and watcher.away_since_s is not None:
            if clock.now() - watcher.away_since_s > CONTROLLER_AWAY_LIMIT_S:
                raise CommandError(f"{watcher.away}; the job itself may well go on: `hpctrain status {folder.name}`")
            text = f"the Slurm controller does not answer ({watcher.away}); waiting"
        else:
            text = (
                _state_text(watcher.known[job_id]) if job_id in watcher.known else f"job {job_id} goes on with the run"
            )
        if text != shown:
            say(text)
            shown = text
        clock.sleep(max(0.2, watcher.next_s - clock.now()))


def _state_text(job: JobInfo) -> str:
    if job.is_waiting:
        return f"job {job.job_id} waits: {pending_job_text(job)}"
    return f"job {job.job_id} is {job.state.lower()}"


def _is_done(folder: Path) -> bool:
    attempts = RunFolder(folder).attempts()
    return bool(attempts) and attempts[-1].get("code") == 0


def _request(run: Run) -> JobRequest:
    cluster = run.cluster
    fewest, most = cluster.node_range
    return JobRequest(
        partition=cluster.partition,
        nodes_min=fewest,
        nodes_max=most,
        time_s=parse_time_limit(cluster.time) if cluster.time else None,
        # A GPU type without a number requests at least one GPU.
        gpus_per_node=gpus_per_node(run) or (1 if cluster.gpu_type and cluster.device != "cpu" else None),
        account=cluster.account,
        qos=cluster.qos,
        gpu_type=cluster.gpu_type,
        reservation=cluster.reservation,
        kinds=node_groups(run) if cluster.groups or cluster.constraint else (),
    )


HORIZON_S = 300 * 86400.0
"""Seconds from now; an estimated start after them says nothing about the real start. Slurm assumes that a job without a
time limit runs for a year, and a thousand years for each such job that waits ahead (seen with 22.05 and 24.11). A job
that waits because of an account's or a QOS's limit also gets such a late start."""


_NODELIST = re.compile(r"^#SBATCH --nodelist=.*\n", re.MULTILINE)


def estimate_start(run: Run, script: str, slurm: Slurm, now: float) -> list[str]:
    """Return when Slurm expects the job of a script to start, as a line for a person; nothing is queued. If Slurm does
    not answer, the line says so.

    Args:
        run: the run that the script is for.
        script: text of the job script.
        now: seconds since 1970.

    Raises:
        RefusedError: sbatch would refuse the job; the message quotes sbatch.
    """
    listed = len(expand_node_set(run.cluster.nodelist or ""))
    gets_others = 0 < listed < run.cluster.node_range[0]
    with tempfile.NamedTemporaryFile("w", suffix=".sh", prefix="hpctrain-") as file:
        # sbatch --test-only refuses a job of more nodes than --nodelist names, although sbatch starts it (seen with
        # 22.05 and 24.11).
        file.write(_NODELIST.sub("", script) if gets_others else script)
        file.flush()
        try:
            estimate = slurm.test_only(Path(file.name))
        except CommandError as error:
            return [f"not checked before submitting: whether Slurm takes the job ({error})"]
    if estimate.problem is not None:
        raise RefusedError(f"sbatch --test-only refuses the job: {estimate.problem}")
    # For a constraint with counts, Slurm 22.05 names nodes that the constraint excludes, although it allocates others
    # (seen).
    words = start_words(estimate, now, with_nodes=not run.cluster.groups and not gets_others)
    words += ", not counting the time until the nodes of cluster.nodelist are free" if gets_others else ""
    return [f"{words}, not counting the jobs it waits for" if run.cluster.after else words]


def start_words(estimate: StartEstimate, now: float, with_nodes: bool = True) -> str:
    """Return a sentence that says when a job would start if the queue stays as it is.

    Args:
        now: seconds since 1970.
        with_nodes: whether to name the nodes on which the job would start.
    """
    if estimate.start_s is None:
        return "Slurm takes the job and does not say when it would start"
    wait_s = estimate.start_s - now
    if wait_s > HORIZON_S:
        return (
            f"Slurm takes the job and cannot say when it starts (it counts up to {utc_text(estimate.start_s)[:4]}): "
            "its nodes are taken by jobs without a time limit, or a limit of your account or QOS holds it; once it "
            "waits, `hpctrain status` tells which"
        )
    when = "at once" if wait_s < 60 else f"in {format_seconds(wait_s)} ({utc_text(estimate.start_s)})"
    where = f" on {compress_node_set(estimate.nodes)}" if with_nodes else ""
    return f"Slurm expects to start it {when}{where}"
