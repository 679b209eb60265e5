"""A probe as a Slurm job of its own: one task on each allocated node, started and waited for by srun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.process import Runner
from hpctrain.launch.probe_watch import Progress, quiet, raise_for, watch_probe
from hpctrain.records.topology import Topology
from hpctrain.slurm.commands import client_environment


@dataclass(frozen=True)
class ProbeJob:
    """What the probe's job asks Slurm for."""

    nodes: int
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = "15"
    """Wall-time limit as Slurm writes it: minutes."""
    nodelist: str | None = None
    """Exactly these nodes."""


def probe_job(
    job: ProbeJob,
    folder: Path,
    runner: Runner,
    clock: Clock,
    device: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Topology:
    """Probe nodes that Slurm allocates; inside an allocation, those of it.

    Args:
        folder: an empty folder on a file system that the nodes share; the caller removes it.

    Raises:
        CommandError: srun is not on the path.
        HpctrainError: the job was refused, ended early or hangs; the message has its last line.
    """
    log = folder / "srun.log"
    inside = "SLURM_JOB_ID" in os.environ
    env = dict(os.environ) if inside else client_environment(os.environ)
    process = runner.start(srun_command(job, folder.resolve(), device, seed), env=env, log=log)
    try:
        watch_probe(process, folder, clock, progress or quiet, queued=True)
        if not (folder / "topology.json").exists():
            raise_for(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            if process.wait(10.0) is None:
                process.kill()
    return Topology.read(folder / "topology.json")


def srun_command(job: ProbeJob, folder: Path, device: str, seed: int) -> list[str]:
    """The argv: a task a node with everything of it, which learns from Slurm which node it is."""
    asked: Sequence[tuple[str, str | None]] = (
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("time", job.time),
        ("nodelist", job.nodelist),
    )
    options = [f"--{name}={value}" for name, value in asked if value is not None]
    argv = ["srun", f"--nodes={job.nodes}", "--ntasks-per-node=1", "--exclusive", "--kill-on-bad-exit=0", "--wait=0"]
    argv += ["--job-name=hpctrain-probe", *options]
    argv += [sys.executable, "-m", "hpctrain.node", "probe", "--folder", str(folder)]
    return [*argv, "--device", device, "--seed", str(seed)]
