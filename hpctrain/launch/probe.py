"""Starts a probe as a Slurm job or as processes of this machine, reports its progress, and returns its topology."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import storage_errors
from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError, HpctrainError, InputError
from hpctrain.base.json_text import parse_json
from hpctrain.base.module_argv import program
from hpctrain.base.process import Process, Runner, end_process
from hpctrain.jobs.partition_checks import candidate_partitions, gpus_per_node_available
from hpctrain.launch.local import LocalNodes, local_nodes
from hpctrain.launch.preflight.site import VARIABLES, place_defaults
from hpctrain.probe.measure.settings import PARTIAL_FILE
from hpctrain.records.topology.topology import Topology
from hpctrain.slurm.commands import Slurm, client_environment

POLL_S = 0.1
STALL_S = 90.0
"""Seconds without progress after which a probe is given up. The first node reports progress even if other nodes hang,
so after this time the first node itself hangs."""

FINAL_WAIT_S = 3.0
"""Seconds that the probe's processes get to end by themselves once topology.json is written."""

Progress = Callable[[str, int, int], None]
"""Function that is called with (phase, done, planned) at each change. The phases are join, links, devices and backend;
`done` and `planned` count rounds in phase links, else nodes."""


@dataclass(frozen=True)
class ProbeRequest:
    """The settings of a probe."""

    device: str = "auto"
    """Devices to measure: auto, cpu, cuda, or none to measure links only."""
    seed: int = 0
    """Seed of the order of the rounds."""
    mode: str = "full"
    """Mode of the probe: health, full or sampled."""
    prior: Path | None = None
    """File with a topology that says which nodes share a switch, on a file system that the nodes share; None: no
    prior."""

    shared: bool = False
    """Whether other jobs may run on the nodes."""
    cpu_devices: int = 1
    """Number of devices into which a node without GPUs is cut."""

    @property
    def options(self) -> list[str]:
        """Return the request as options of `hpctrain.node probe`."""
        prior = ["--prior", str(self.prior.resolve())] if self.prior is not None else []
        shared = ["--shared"] if self.shared else []
        words = ["--device", self.device, "--cpu-devices", str(self.cpu_devices), "--seed", str(self.seed)]
        return [*prior, *shared, *words, "--mode", self.mode]


DEFAULTS = ProbeRequest()


def watch_probe(
    process: Process, folder: Path, clock: Clock, progress: Progress, queued: bool = False, result: Path | None = None
) -> None:
    """Wait until a probe has ended, and report its progress.

    Args:
        process: the process of the probe's first node, or the srun that runs the processes of all nodes.
        folder: the probe's folder, in which the first node writes progress.json.
        queued: whether the probe may first wait in Slurm's queue; until its first progress there is no time limit.
        result: the file that the first node writes last. Once it exists, the process gets FINAL_WAIT_S to end; then the
            function returns although the process still runs.

    Raises:
        HpctrainError: the probe makes no progress for STALL_S.
    """
    seen: tuple[str, int, int] | None = None
    since = clock.now()
    written: float | None = None
    while process.poll() is None:
        if written is None and result is not None and result.exists():
            written = clock.now()
        if written is not None and clock.now() - written > FINAL_WAIT_S:
            return
        waiting = queued and seen is None
        if not waiting and clock.now() - since > STALL_S:
            raise HpctrainError(f"probe: the first node got no further in {STALL_S:g} s (last: {seen}); try again")
        now = _progress(folder)
        if now is not None and now != seen:
            progress(*now)
            seen, since = now, clock.now()
        clock.sleep(POLL_S)


def raise_probe_error(process: Process, log: Path) -> None:
    """Check that a probe's process ended with exit code 0.

    Raises:
        HpctrainError: the process ended with another code; the message has the last line of its log.
    """
    code = process.poll()
    if code == 0:
        return
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    last = lines[-1] if lines else "it printed nothing"
    raise HpctrainError(f"probe: it ended with code {code}: {last}")


def no_progress(phase: str, done: int, planned: int) -> None:
    """Do nothing: the default for the argument `progress`."""


def _progress(folder: Path) -> tuple[str, int, int] | None:
    try:
        value = parse_json((folder / "progress.json").read_text())
    except (OSError, ValueError):
        return None  # not written yet
    return str(value["phase"]), int(value["done"]), int(value["planned"])


def probe_local(
    count: int, folder: Path, runner: Runner, clock: Clock, request: ProbeRequest = DEFAULTS,
    progress: Progress = no_progress,
) -> Topology:  # fmt: skip
    """Probe `count` virtual nodes of this machine, and return the measured topology.

    Args:
        folder: an empty folder for the probe's files and logs; the caller removes it.

    Raises:
        HpctrainError: the first node's process cannot be started, ended with an error, whose last line is in the
            message, or hangs.
    """
    nodes = local_nodes(count)
    local = LocalNodes(folder, nodes, runner)
    processes: dict[str, Process] = {}
    try:
        for node in nodes:
            processes[node] = local.start("probe", node, folder / f"{node}.log", request.options)
        watch_probe(processes[nodes[0]], folder, clock, progress)
        raise_probe_error(processes[nodes[0]], folder / f"{nodes[0]}.log")
        deadline = clock.now() + FINAL_WAIT_S
        for process in processes.values():
            process.wait(max(0.0, deadline - clock.now()))
    finally:
        for process in processes.values():
            end_process(process)
    return Topology.read(folder / "topology.json", owned=True)


@dataclass(frozen=True)
class ProbeJob:
    """The probe's request to Slurm. A field that is None adds no option, unless the text below the field says what None
    means."""

    nodes: int
    """Number of nodes."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = "15"
    """Time limit as Slurm writes it; a plain number means minutes."""
    nodelist: str | None = None
    """Node set that Slurm must allocate; None: Slurm chooses."""
    gpus_per_node: int | None = None
    """GPUs on each node; None: as many as Slurm lists on the nodes, or no GPUs if only CPUs are measured."""
    name: str = "hpctrain-probe"
    """Name of the job."""
    constraint: str | None = None
    """Features that each node has, in Slurm's form."""
    exclude: str | None = None
    """Node set that Slurm must not allocate."""
    gpu_type: str | None = None
    """Type of the GPUs, by Slurm's name; None: any."""


def with_site_defaults(job: ProbeJob, runner: Runner) -> tuple[ProbeJob, list[str]]:
    """Return the job with defaults for what was not given, and lines that name each default and its source.

    A default is from the profile of this cluster in site.yaml, otherwise from a variable such as SBATCH_ACCOUNT. Inside
    an allocation the job is unchanged, because no job is submitted.

    Raises:
        FileError: site.yaml is wrong.
    """
    if "SLURM_JOB_ID" in os.environ:
        return job, []
    defaults = place_defaults(Slurm(runner), os.environ)
    keys = [key for key in (*VARIABLES, "constraint", "exclude") if key in defaults and getattr(job, key) is None]
    taken: dict[str, Any] = {key: defaults[key][0] for key in keys}
    return replace(job, **taken), [f"{key}: {defaults[key][0]}, from {defaults[key][1]}" for key in keys]


def probe_job(
    job: ProbeJob, folder: Path, runner: Runner, clock: Clock, request: ProbeRequest = DEFAULTS,
    progress: Progress = no_progress,
) -> Topology:  # fmt: skip
    """Probe nodes that Slurm allocates, or those of the allocation that this process is in; return the measured
    topology.

    Args:
        folder: an empty folder on a file system that the nodes share; the caller removes it.

    Raises:
        CommandError: srun is not on the path.
        HpctrainError: srun was refused or ended early, with its last line in the message; or the probe hangs.
    """
    log = folder / "srun.log"
    request = replace(request, shared=request.shared or has_part_of_nodes(Slurm(runner), os.environ))
    process = start_on_nodes(job, probe_argv(folder.resolve(), request), request.device != "cpu", runner, log)
    try:
        # If a node dies after the measurement, srun waits for it forever. The result is complete without it.
        watch_probe(process, folder, clock, progress, queued=True, result=folder / "topology.json")
        if not (folder / "topology.json").exists():
            raise_probe_error(process, log)
    finally:
        end_step(process)
    return Topology.read(folder / "topology.json", owned=True)


def start_on_nodes(job: ProbeJob, command: Sequence[str], with_gpus: bool, runner: Runner, log: Path) -> Process:
    """Start srun, which runs `command` once on each node of a new job, or of the allocation that this process is in.

    Args:
        with_gpus: whether to request all GPUs of the nodes where `job` names no number.
        log: file to which the output of srun is appended.

    Raises:
        CommandError: srun is not on the path.
        StorageError: `log` cannot be opened.
    """
    inside = "SLURM_JOB_ID" in os.environ
    env = dict(os.environ) if inside else client_environment(os.environ)
    if job.gpus_per_node is None and with_gpus:
        job = replace(job, gpus_per_node=_gpus(job, Slurm(runner), os.environ if inside else {}))
    with storage_errors(log):
        return runner.start(srun_command(job, command, inside), env=env, log=log)


def end_step(process: Process) -> None:
    """End an srun that may still wait for a lost node: by SIGTERM, and after 10 s by SIGKILL."""
    if process.poll() is None:
        process.terminate()
        if process.wait(10.0) is None:
            process.kill()


def _gpus(job: ProbeJob, slurm: Slurm, environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs to request on each node; None for none.

    Args:
        environ: variables of the allocation that this process is in; {} outside of one: the nodes of the partition
            then decide.
    """
    if "SLURM_JOB_ID" in environ:
        count = environ.get("SLURM_GPUS_ON_NODE", "")
        return int(count) if count.isdigit() else None
    try:
        partitions = candidate_partitions(job.partition, slurm.partitions())
        return gpus_per_node_available(partitions, slurm.nodes(), job.nodes, job.gpu_type, job.constraint) or None
    except CommandError:
        return None  # srun asks the controller next, and reports the error


def _typed_gpus(job: ProbeJob) -> str | None:
    if not job.gpus_per_node:
        return None
    return f"{job.gpu_type}:{job.gpus_per_node}" if job.gpu_type else str(job.gpus_per_node)


def has_part_of_nodes(slurm: Slurm, environ: Mapping[str, str]) -> bool:
    """Return whether this process is in an allocation that has only a part of its nodes. False outside of an
    allocation, because the probe's own job gets whole nodes."""
    try:
        info = slurm.job(environ["SLURM_JOB_ID"]) if "SLURM_JOB_ID" in environ else None
    except CommandError:
        return False
    return info is not None and bool(info.shares_nodes)


def probe_argv(folder: Path, request: ProbeRequest) -> list[str]:
    """Return the argv of a node's part in a probe. The process takes the node's name from Slurm's environment."""
    return [*program("hpctrain.node"), "probe", "--folder", str(folder), *request.options]


def srun_command(job: ProbeJob, command: Sequence[str], inside: bool = False) -> list[str]:
    """Return the argv of an srun that starts `command` once on each node, with all resources of the node.

    Args:
        job: the resources to ask Slurm for.
        command: program and arguments.
        inside: whether this process is in an allocation; a step there gets no --exclusive, which would limit each task
            to one CPU.
    """
    asked: Sequence[tuple[str, str | None]] = (
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("time", job.time),
        ("constraint", job.constraint),
        ("nodelist", job.nodelist),
        ("exclude", job.exclude),
        ("gpus-per-node", _typed_gpus(job)),
        ("gpu-bind", "none" if job.gpus_per_node else None),
    )
    options = [f"--{name}={value}" for name, value in asked if value is not None]
    # Set the number of tasks: otherwise that of an allocation (salloc -n 16) would also hold for its steps.
    argv = ["srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1"]
    argv += [] if inside else ["--exclusive"]
    argv += ["--kill-on-bad-exit=0", "--wait=0", f"--job-name={job.name}", *options]
    return [*argv, *command]


def measure_topology(
    where: int | ProbeJob, output: Path, runner: Runner, clock: Clock, request: ProbeRequest, progress: Progress,
    say: Callable[[str], None],
) -> Topology:  # fmt: skip
    """Probe virtual nodes of this machine or nodes of the cluster, write the topology to the file `output`, and return
    it. If the probe ends early, the file gets the rounds that were measured.

    Args:
        where: number of virtual nodes, or the request to Slurm.
        say: called with a line if only a part was measured.

    Raises:
        InputError, StorageError: the file cannot be written, or (InputError) this probe has no use for the prior.
        HpctrainError: the probe failed, or srun is not on the path.
    """
    local = isinstance(where, int)
    _check_output(output)
    if request.prior is not None:
        _check_prior(request.prior, request.mode, local)
    # Other nodes see the folder of `output`, and perhaps not this machine's /tmp.
    place = None if local else output.resolve().parent
    with tempfile.TemporaryDirectory(prefix=".hpctrain-probe-", dir=place) as name, _rescued(Path(name), output, say):
        if isinstance(where, int):
            topology = probe_local(where, Path(name), runner, clock, request, progress)
        else:
            topology = probe_job(where, Path(name), runner, clock, request, progress)
    topology.write(output)
    return topology


@contextmanager
def _rescued(folder: Path, output: Path, say: Callable[[str], None]) -> Iterator[None]:
    """On Ctrl-C or an error of the probe, write the topology of the rounds measured so far to `output`.

    Args:
        folder: the probe's temporary folder.
        say: called with a line that tells how many rounds were measured.
    """
    try:
        yield
    except (KeyboardInterrupt, HpctrainError):
        partial = folder / PARTIAL_FILE
        if partial.exists():
            topology = Topology.read(partial)
            topology.write(output)
            measured = topology.provenance
            say(f"wrote {output}: {measured.rounds_done} of {measured.rounds_planned} rounds")
        raise


def _check_prior(prior: Path, mode: str, local: bool) -> None:
    """Check, before a job is queued, that the probe can use the file `prior`, the value of --prior.

    Raises:
        InputError: a probe of this mode, or with --local, uses no prior; or the file names no switches.
    """
    if local:
        raise InputError("--prior: not with --local, whose virtual nodes have no switches between them")
    if mode == "full":
        raise InputError("--prior: the mode is full, which infers the switches; add --mode sampled or --mode health")
    if not Topology.read(prior).fabric.clusters:
        raise InputError(f"--prior {prior}: it names no switches (fabric.clusters is empty); give another file or none")


def _check_output(output: Path) -> None:
    """Check, before anything is measured, that the file `output` can be written.

    Raises:
        InputError: the folder of `output` is missing, or may not be written to.
    """
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: there is no folder {output.parent}; make it first")
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"--output {output}: {output.parent} cannot be written; choose another folder")
