"""Slurm's commands: argv lists, a clean environment, a time-out on each call, answers as records."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import CommandError, CommandTimeoutError, InputError
from hpctrain.base.process import CommandResult, Runner
from hpctrain.slurm.accounting import parse_sacct, sacct_argv
from hpctrain.slurm.cluster import (
    ClusterConfig,
    ClusterState,
    NodeInfo,
    Partition,
    parse_config,
    parse_nodes,
    parse_partitions,
)
from hpctrain.slurm.fields import node_names
from hpctrain.slurm.job import SEPARATOR, SQUEUE_FORMAT, JobInfo, parse_scontrol_job, parse_squeue
from hpctrain.slurm.time import read_moment

TIMEOUT_S = 60.0
"""A client gives up on a controller that is away after 18 s as configured by default; a busy one may take longer."""

ACCOUNTING_TIMEOUT_S = 15.0
"""Accounting is a second opinion; nobody should wait for it as long as for the controller."""

NO_COMMANDS = "no Slurm on the path (sbatch was not found)"
_CONFIGURE = "set SLURM_CONF to the cluster's slurm.conf, or load the site's Slurm module"

_INHERITED = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")
_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_JWT")

_UNKNOWN_JOB = "Invalid job id specified"
_AWAY = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Connection timed out",
    "Zero Bytes were transmitted",
    "slurmctld is in standby",
    "Unexpected message received",  # `scontrol requeue` of 22.05 with no controller there
)
_NOT_CONFIGURED = ("configuration source", "configuration file", "cannot stat file", "Unable to process configuration")
"""What the clients of 22.05 and 24.11 say where no SLURM_CONF leads to a slurm.conf."""
_JOB_ID = re.compile(r"\d+([_+]\d+)?")
_ESTIMATE = re.compile(r"Job \d+ to start at (\S+) using \d+ processors on nodes (\S+)")
_PREFIX = re.compile(r"^(sbatch|scontrol|scancel|squeue): (error|fatal): ")


class ControllerUnreachableError(CommandError):
    """The Slurm controller does not answer. What it last said may still be true; ask again later."""


class NotConfiguredError(CommandError):
    """Slurm's commands are here, and nothing tells them of a cluster."""


@dataclass(frozen=True)
class StartEstimate:
    """What `sbatch --test-only` says of a script."""

    start_s: float | None
    """When it would start, in seconds since 1970; years from now where jobs before it have no time limit, or a limit
    holds it."""
    nodes: tuple[str, ...]
    problem: str | None
    """Why sbatch refuses it, in its own words; None when it is taken."""


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for Slurm's clients: no defaults of a person or of an enclosing job, times in seconds.

    A person's SQUEUE_FORMAT would change the output that is parsed, an enclosing job's SLURM_CPU_BIND the job that is
    submitted. What finds and convinces the controller stays.
    """
    kept = {
        name: value for name, value in environ.items() if name in _KEPT_VARIABLES or not name.startswith(_INHERITED)
    }
    return {**kept, "SLURM_TIME_FORMAT": "%s"}


class Slurm:
    """The Slurm of this machine's configuration, seen through its commands.

    Every method raises ControllerUnreachableError (a CommandError) when the controller does not answer,
    NotConfiguredError when no cluster is known here, and CommandError with the command's own words when it refuses.
    """

    def __init__(self, runner: Runner, environ: Mapping[str, str] | None = None) -> None:
        self._runner = runner
        self._environ = os.environ if environ is None else environ
        self._config: ClusterConfig | None = None

    def available(self) -> bool:
        """Whether sbatch is on the path and knows a cluster; whether the controller answers is another matter."""
        return self.why_unavailable() is None

    def why_unavailable(self) -> str | None:
        """Why nothing can be asked here, and what to do about it; None where sbatch is there and knows a cluster."""
        try:
            # First: a client would look for that file for a minute before it says so.
            self._check_configuration()
            done = self._run(["sbatch", "--version"])
        except CommandError as error:
            return NO_COMMANDS if "not found" in str(error) else str(error)
        return None if done.code == 0 else f"sbatch --version: {_words(done)}"

    def job(self, job_id: str) -> JobInfo | None:
        """The job now; None when Slurm does not know it, or not any more (MinJobAge after its end)."""
        done = self._run(["scontrol", "show", "job", "-o", _checked(job_id)])
        if done.code != 0 and _UNKNOWN_JOB in done.stderr:
            return None
        jobs = parse_scontrol_job(_answer(done))
        # Asked for an array or a heterogeneous job, Slurm answers with its parts.
        return next((job for job in jobs if job.job_id == job_id), jobs[0] if jobs else None)

    def jobs(self, ids: Sequence[str]) -> dict[str, JobInfo]:
        """Several jobs in one call, by id; those that Slurm does not know are left out."""
        if not ids:
            return {}
        listed = ",".join(_checked(job_id) for job_id in ids)
        done = self._run(["squeue", "-h", "-t", "all", "-j", listed, "-O", SQUEUE_FORMAT])
        if done.code != 0 and _UNKNOWN_JOB in done.stderr:
            return {}
        return {job.job_id: job for job in parse_squeue(_answer(done))}

    def ended_jobs(self, ids: Sequence[str]) -> dict[str, JobInfo]:
        """Jobs that the controller has forgotten, by id, as accounting remembers them.

        Many clusters have no accounting, or none that this machine reaches: then there is nothing to tell, which is no
        error.
        """
        if not ids:
            return {}
        try:
            done = self._run(sacct_argv([_checked(job_id) for job_id in ids]), timeout_s=ACCOUNTING_TIMEOUT_S)
            return parse_sacct(done.stdout) if done.code == 0 else {}
        except CommandError:
            return {}

    def partitions(self, nodes: Sequence[NodeInfo] | None = None) -> list[Partition]:
        """The partitions that this user sees, with the resources of their nodes.

        Args:
            nodes: the cluster's nodes, where they were asked for already; default: they are asked for.
        """
        text = _answer(self._run(["scontrol", "show", "partition", "-o"]))
        return parse_partitions(text, self.nodes() if nodes is None else nodes)

    def nodes(self) -> list[NodeInfo]:
        """All nodes."""
        return parse_nodes(_answer(self._run(["scontrol", "show", "node", "-o"])))

    def srun_has(self, option: str) -> bool:
        """Whether srun knows an option: plugins of a site (pyxis) add theirs."""
        return option in _answer(self._run(["srun", "--help"]))

    def config(self) -> ClusterConfig:
        """The settings that decide how a run lives; asked for once, as they do not change while a command runs."""
        if self._config is None:
            self._config = parse_config(_answer(self._run(["scontrol", "show", "config"])))
        return self._config

    def state(self) -> ClusterState:
        """Settings, nodes and partitions, each asked for once."""
        nodes = self.nodes()
        return ClusterState(self.config(), nodes, self.partitions(nodes))

    def cancel(self, job_id: str) -> None:
        """End the job; nothing happens to one that has ended or is unknown."""
        _answer(self._run(["scancel", _checked(job_id)]))

    def signal(self, job_id: str, name: str, to: Literal["steps", "batch", "all"] = "steps") -> bool:
        """Send a signal (USR2, TERM) to all processes of the job's steps, of its batch script, or both.

        False: there is no such job, or it has ended.
        """
        where = {"steps": [], "batch": ["--batch"], "all": ["--full"]}[to]
        done = self._run(["scancel", f"--signal={name}", *where, _checked(job_id)])
        if done.code != 0 and _UNKNOWN_JOB in done.stderr:
            return False
        _answer(done)
        return True

    def requeue(self, job_id: str) -> None:
        """Put a running or ended job back into the queue, where it pauses for cred_expire (AuthInfo)."""
        _answer(self._run(["scontrol", "requeue", _checked(job_id)]))

    def release(self, job_id: str) -> None:
        """Let a held job go."""
        _answer(self._run(["scontrol", "release", _checked(job_id)]))

    def update(self, job_id: str, **fields: str | int) -> None:
        """Change fields of the job: update("7", ExcNodeList="gpu[1-2]", TimeLimit=30)."""
        changes = [f"{field}={value}" for field, value in fields.items()]
        _answer(self._run(["scontrol", "update", f"JobId={_checked(job_id)}", *changes]))

    def submit(self, script: Path, options: Sequence[str] = ()) -> str:
        """Queue a script; its job's id comes back. Options stand above the script's own lines."""
        done = self._run(["sbatch", "--parsable", *options, str(script)], {"SLURM_TIME_FORMAT"})
        return _checked(_answer(done).strip().partition(";")[0])

    def queued_behind(self, script: Path, job_id: str) -> list[str]:
        """This person's jobs in the queue that were made of that very script and wait for the end of that job."""
        columns = ("JobID", "Dependency", "Command")
        shape = ",".join(f"{column}:{SEPARATOR}" for column in columns)
        lines = _answer(self._run(["squeue", "-h", "--me", "-t", "PENDING", "-O", shape])).splitlines()
        found = [line.split(SEPARATOR) for line in lines]
        waits = re.compile(rf"(^|,)afterany:{re.escape(_checked(job_id))}(\(|,|$)")
        return [
            values[0].strip()
            for values in found
            if len(values) > len(columns) and waits.search(values[1]) and values[2].strip() == str(script)
        ]

    def test_only(self, script: Path, options: Sequence[str] = ()) -> StartEstimate:
        """Ask sbatch what would become of a script; nothing is queued."""
        done = self._run(["sbatch", "--test-only", *options, str(script)])
        if done.code != 0:
            return StartEstimate(None, (), _words(done))
        found = _ESTIMATE.search(done.stderr)
        if not found:
            return StartEstimate(None, (), None)
        return StartEstimate(read_moment(found[1]), node_names(found[2]), None)

    def _run(self, argv: Sequence[str], without: Collection[str] = (), timeout_s: float = TIMEOUT_S) -> CommandResult:
        """Run a client.

        Args:
            without: variables that it must not pass on.

        Raises:
            ControllerUnreachableError: the controller does not answer.
            NotConfiguredError: no cluster is known here.
            CommandError: the command is not there.
        """
        env = {name: value for name, value in client_environment(self._environ).items() if name not in without}
        try:
            done = self._runner.run(argv, timeout_s=timeout_s, env=env)
        except CommandTimeoutError as error:
            self._check_configuration()
            raise ControllerUnreachableError(f"the Slurm controller is away ({error}); ask again later") from error
        if done.code != 0 and any(text in done.stderr for text in _NOT_CONFIGURED):
            conf = self._check_configuration()
            unset = "SLURM_CONF is not set" if not conf else f"SLURM_CONF is {conf}"
            told = f"Slurm's commands are here and find no cluster: {unset} ({_words(done)})"
            raise NotConfiguredError(f"{told}; {_CONFIGURE}")
        if done.code != 0 and any(text in done.stderr for text in _AWAY):
            raise ControllerUnreachableError(f"the Slurm controller is away ({_words(done)}); ask again later")
        return done

    def _check_configuration(self) -> str | None:
        """SLURM_CONF, if it is set.

        Raises:
            NotConfiguredError: it names no file.
        """
        conf = self._environ.get("SLURM_CONF")
        if conf and not _is_file(Path(conf)):
            raise NotConfiguredError(f"SLURM_CONF: {conf}: there is no such file; {_CONFIGURE}")
        return conf


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # a folder on its way may not be entered


def _checked(job_id: str) -> str:
    """A job id that no command takes for an option or a list."""
    if not _JOB_ID.fullmatch(job_id):
        raise InputError(f"job id: found '{job_id}'; allowed: a number, or number_task for one task of an array")
    return job_id


def _answer(done: CommandResult) -> str:
    if done.code != 0:
        raise CommandError(f"{' '.join(done.argv[:3])}: {_words(done)}")
    return done.stdout


def _words(done: CommandResult) -> str:
    """What a command that failed says, in one line; a sentence that it says twice is told once."""
    lines = [_PREFIX.sub("", line.strip()) for line in done.stderr.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines)) or f"exit code {done.code} and no message"
