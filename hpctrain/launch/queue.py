"""What can be known before a job is queued, and waiting for it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError, InputError, Refused
from hpctrain.launch.file_system import check_shared
from hpctrain.launch.folder import RunFolder
from hpctrain.launch.foresight import check_time, preemption_words
from hpctrain.launch.job_script import check_options, gpus_per_node
from hpctrain.records.locate import open_jobs
from hpctrain.records.run import Run
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo, pending_words
from hpctrain.slurm.limits import Request, check_request
from hpctrain.slurm.time import parse_time_limit
from hpctrain.slurm.watch import Watcher

AWAY_LIMIT_S = 600.0
"""How long `--wait` puts up with a controller that does not answer."""


def check_queue(run: Run, slurm: Slurm, runs: Path) -> list[str]:
    """Check the request against the cluster as it is now; what a person should know, as lines.

    Raises:
        InputError: there is no Slurm here, a value cannot be read, an option is not to be passed on, the time limit
            leaves no time to train, or run folders would lie in this machine's memory.
        Refused: the request is more than the partition gives; every reason is told.
    """
    if not slurm.available():
        raise InputError(
            "no Slurm on the path (sbatch was not found); log in to the cluster, or use `hpctrain train --local N`"
        )
    check_options(run.cluster.sbatch)
    check_time(run)
    request = _request(run)
    try:
        nodes = slurm.nodes()
        partitions = slurm.partitions(nodes)
        problems = check_request(request, partitions, nodes)
        words = preemption_words(run, slurm, partitions)
    except CommandError as error:
        return [*check_shared(runs, ()), f"not checked before submitting: the partition's limits ({error})"]
    notes = check_shared(runs, [node.name for node in nodes])
    if problems:
        raise Refused("\n".join(problems))
    check_time(run, partitions)
    return [*notes, *words]


def wait_for_job(folder: Path, job_id: str, slurm: Slurm, clock: Clock, say: Callable[[str], None]) -> int:
    """Wait until the run's last job has ended; 0 when the run is done, else 1. Changes are told as they are seen.

    Raises:
        CommandError: the controller did not answer for ten minutes.
    """
    watcher, said, seen = Watcher(slurm, [job_id]), "", [job_id]
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
            if clock.now() - watcher.away_since_s > AWAY_LIMIT_S:
                raise CommandError(f"{watcher.away}; the job itself may well go on: `hpctrain status {folder.name}`")
            text = f"the Slurm controller does not answer ({watcher.away}); waiting"
        else:
            text = _words(watcher.known[job_id]) if job_id in watcher.known else f"job {job_id} goes on with the run"
        if text != said:
            say(text)
            said = text
        clock.sleep(max(0.2, watcher.next_s - clock.now()))


def _words(job: JobInfo) -> str:
    if job.state.is_waiting:
        return f"job {job.job_id} waits: {pending_words(job)}"
    return f"job {job.job_id} is {job.state.value.lower()}"


def _is_done(folder: Path) -> bool:
    attempts = RunFolder(folder).attempts()
    return bool(attempts) and attempts[-1].get("code") == 0


def _request(run: Run) -> Request:
    cluster = run.cluster
    fewest, most = cluster.node_range
    return Request(
        partition=cluster.partition,
        nodes_min=fewest,
        nodes_max=most,
        time_s=parse_time_limit(cluster.time) if cluster.time else None,
        gpus_per_node=gpus_per_node(run),
        account=cluster.account,
        qos=cluster.qos,
    )
