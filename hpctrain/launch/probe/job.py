"""Run a probe as a Slurm job: one task on each allocated node; srun starts the tasks and waits for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError
from hpctrain.base.module_argv import program
from hpctrain.base.process import Runner
from hpctrain.jobs.partition_checks import candidate_partitions, gpus_per_node_available
from hpctrain.launch.probe.progress import (
    DEFAULTS,
    ProbeRequest,
    Progress,
    no_progress,
    raise_probe_error,
    watch_probe,
)
from hpctrain.records.topology.topology import Topology
from hpctrain.slurm.commands import Slurm, client_environment


@dataclass(frozen=True)
class ProbeJob:
    """The probe's request to Slurm."""

    nodes: int
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = "15"
    """Time limit as Slurm writes it; a plain number means minutes."""
    nodelist: str | None = None
    """Node set that Slurm must allocate; None: Slurm chooses."""
    gpus_per_node: int | None = None
    """GPUs on each node; None: as many as Slurm lists on the nodes, or no GPUs if only CPUs are measured."""


def probe_job(
    job: ProbeJob, folder: Path, runner: Runner, clock: Clock, request: ProbeRequest = DEFAULTS,
    progress: Progress = no_progress,
) -> Topology:  # fmt: skip
    """Probe nodes that Slurm allocates, or those of the allocation that this process is in; return the topology.

    Args:
        folder: an empty folder on a file system that the nodes share; the caller removes it.

    Raises:
        CommandError: srun is not on the path.
        HpctrainError: the job was refused, ended early or hangs; the message has its last line.
    """
    log = folder / "srun.log"
    inside = "SLURM_JOB_ID" in os.environ
    env = dict(os.environ) if inside else client_environment(os.environ)
    if job.gpus_per_node is None and request.device != "cpu":
        job = replace(job, gpus_per_node=_gpus(job, Slurm(runner), os.environ if inside else {}))
    argv = srun_command(job, folder.resolve(), request, inside)
    process = runner.start(argv, env=env, log=log)
    try:
        # If a node dies after the measurement, srun waits for it forever. The result is complete without it.
        watch_probe(process, folder, clock, progress, queued=True, result=folder / "topology.json")
        if not (folder / "topology.json").exists():
            raise_probe_error(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            if process.wait(10.0) is None:
                process.kill()
    return Topology.read(folder / "topology.json", owned=True)


def _gpus(job: ProbeJob, slurm: Slurm, environ: Mapping[str, str]) -> int | None:
    """Return the GPUs to request on each node: those of the allocation, else those of the partition's nodes; None for
    none."""
    if "SLURM_JOB_ID" in environ:
        count = environ.get("SLURM_GPUS_ON_NODE", "")
        return int(count) if count.isdigit() else None
    try:
        partitions = candidate_partitions(job.partition, slurm.partitions())
        return gpus_per_node_available(partitions, slurm.nodes(), job.nodes) or None
    except CommandError:
        return None  # srun asks the controller next, and reports the error


def srun_command(job: ProbeJob, folder: Path, request: ProbeRequest, inside: bool = False) -> list[str]:
    """Return srun's argv: one task per node with all its resources. A task takes its node's name from Slurm's
    environment.

    Args:
        inside: the step runs in an allocation, where --exclusive would give it one CPU per task.
    """
    asked: Sequence[tuple[str, str | None]] = (
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("time", job.time),
        ("nodelist", job.nodelist),
        ("gpus-per-node", str(job.gpus_per_node) if job.gpus_per_node else None),
        ("gpu-bind", "none" if job.gpus_per_node else None),
    )
    options = [f"--{name}={value}" for name, value in asked if value is not None]
    # Set the number of tasks: otherwise that of an allocation (salloc -n 16) would also hold for its steps.
    argv = ["srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1"]
    argv += [] if inside else ["--exclusive"]
    argv += ["--kill-on-bad-exit=0", "--wait=0", "--job-name=hpctrain-probe", *options]
    return [*argv, *program("hpctrain.node"), "probe", "--folder", str(folder), *request.options]
