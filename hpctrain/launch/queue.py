"""What can be known before a job is queued, and waiting for it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError, InputError, Refused
from hpctrain.launch.folder import RunFolder
from hpctrain.launch.foresight import check_time, preemption_words
from hpctrain.launch.job_script import gpus_per_node
from hpctrain.records.run import Run
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo, pending_words
from hpctrain.slurm.limits import Request, check_request
from hpctrain.slurm.time import parse_time_limit
from hpctrain.slurm.watch import Watcher

NODE_LOCAL = ("tmpfs", "ramfs", "devtmpfs")
"""File systems that no other node can see."""
AWAY_LIMIT_S = 600.0
"""How long `--wait` puts up with a controller that does not answer."""


def check_queue(run: Run, slurm: Slurm, runs: Path) -> list[str]:
    """Check the request against the cluster as it is now; what a person should know, as lines.

    Raises:
        InputError: there is no Slurm here, a value cannot be read, the time limit leaves no time to train, or the run
            folder would be on a node's own disk.
        Refused: the request is more than the partition gives; every reason is told.
    """
    if not slurm.available():
        raise InputError(
            "no Slurm on the path (sbatch was not found); log in to the cluster, or use `hpctrain train --local N`"
        )
    kind = file_system_of(runs.resolve())
    if kind in NODE_LOCAL:
        raise InputError(
            f"{runs.resolve()}: is on {kind}, which only this machine sees; run folders must lie on a file system that "
            "all nodes share: set HPCTRAIN_RUNS"
        )
    check_time(run)
    try:
        partitions = slurm.partitions()
        problems = check_request(_request(run), partitions, slurm.nodes())
        words = preemption_words(run, slurm, partitions)
    except CommandError as error:
        return [f"not checked before submitting: the partition's limits ({error})"]
    if problems:
        raise Refused("\n".join(problems))
    check_time(run, partitions)
    return words


def file_system_of(path: Path) -> str:
    """Type of the file system that holds `path`, or would: that of its nearest existing parent."""
    while not path.exists():
        path = path.parent
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda mount: len(mount.mountpoint), reverse=True)
    for mount in mounts:
        if path == Path(mount.mountpoint) or Path(mount.mountpoint) in path.parents:
            return str(mount.fstype)
    return ""


def wait_for_job(folder: Path, job_id: str, slurm: Slurm, clock: Clock, say: Callable[[str], None]) -> int:
    """Wait until the job has ended for good; 0 when the run is done, else 1. Changes are told as they are seen.

    Raises:
        CommandError: the controller did not answer for ten minutes.
    """
    watcher, said = Watcher(slurm, [job_id]), ""
    while True:
        watcher.poll(clock.now())
        if watcher.all_ended:
            return _exit_code(folder)
        if watcher.away is not None and watcher.away_since_s is not None:
            if clock.now() - watcher.away_since_s > AWAY_LIMIT_S:
                raise CommandError(f"{watcher.away}; the job itself may well go on: `hpctrain status {folder.name}`")
            text = f"the Slurm controller does not answer ({watcher.away}); waiting"
        else:
            text = _words(watcher.known[job_id])
        if text != said:
            say(text)
            said = text
        clock.sleep(max(0.2, watcher.next_s - clock.now()))


def _words(job: JobInfo) -> str:
    if job.state.is_waiting:
        return f"job {job.job_id} waits: {pending_words(job)}"
    return f"job {job.job_id} is {job.state.value.lower()}"


def _exit_code(folder: Path) -> int:
    attempts = RunFolder(folder).attempts()
    return 0 if attempts and attempts[-1].get("code") == 0 else 1


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
