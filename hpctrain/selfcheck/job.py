"""The selfcheck as a Slurm job: each node first takes part in one probe of all nodes, then runs its paths."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.module_argv import program
from hpctrain.base.process import Process, Runner
from hpctrain.launch.probe import FINAL_WAIT_S, ProbeJob, ProbeRequest, end_step, probe_argv, start_on_nodes
from hpctrain.records.history.selfcheck import SelfcheckReport
from hpctrain.records.topology.topology import Topology
from hpctrain.selfcheck.figures import rows_of
from hpctrain.selfcheck.report import merged

POLL_S = 0.5


def selfcheck_job(
    job: ProbeJob, folder: Path, request: ProbeRequest, runner: Runner, clock: Clock, only: Sequence[str] = ()
) -> SelfcheckReport:  # fmt: skip
    """Run the selfcheck on nodes that Slurm allocates, or on those of the allocation in which this process runs. Return
    one report of all nodes.

    Args:
        job: what to ask Slurm for.
        folder: an empty folder on a file system that the nodes share; the caller removes it.
        request: what the probe measures.
        only: parts of the names of the paths to run, without a probe; empty: all paths, with the probe.

    Raises:
        CommandError: srun is not on the path.
        HpctrainError: the job was refused, or ended without any result; the message has the last line of srun's output.
    """
    folder = folder.resolve()
    probe = shlex.join(probe_argv(folder, request))
    chosen = [word for part in only for word in ("--only", part)]
    check = shlex.join([*program("hpctrain.selfcheck"), "--folder", str(folder), *chosen])
    command = ["bash", "-c", f"exec {check}" if only else f"{probe}; exec {check}"]
    log = folder / "srun.log"
    process = start_on_nodes(job, command, request.device != "cpu", runner, log)
    try:
        _wait(process, folder, job.nodes, clock)
    finally:
        end_step(process)
    reports = [SelfcheckReport.read(path, owned=True) for path in sorted(folder.glob("selfcheck-*.json"))]
    if not reports:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise HpctrainError(
            f"selfcheck: the job ended without a result: {lines[-1] if lines else 'it printed nothing'}"
        )
    measured = folder / "topology.json"
    topology = Topology.read(measured, owned=True) if measured.exists() else None
    return merged(reports, rows_of(topology) if topology is not None else [], topology)


def _wait(process: Process, folder: Path, nodes: int, clock: Clock) -> None:
    """Wait until srun has ended, but after the last node's result at most `FINAL_WAIT_S`.

    Args:
        folder: where each node writes its result.
        nodes: number of nodes.
    """
    complete: float | None = None
    while process.poll() is None:
        if complete is None and len(list(folder.glob("selfcheck-*.json"))) == nodes:
            complete = clock.now()
        if complete is not None and clock.now() - complete > FINAL_WAIT_S:
            return
        clock.sleep(POLL_S)
