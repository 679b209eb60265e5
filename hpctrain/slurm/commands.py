"""Runs Slurm's commands with a clean environment and a time limit for each call, and returns their answers as
records."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import CommandError, CommandTimeoutError, InputError
from hpctrain.base.process import CommandResult, Runner
from hpctrain.slurm.accounts import UserAccounts, parse_accounts, sacctmgr_argv
from hpctrain.slurm.cluster import (
    ClusterConfig,
    ClusterState,
    NodeInfo,
    Partition,
    parse_config,
    parse_nodes,
    parse_partitions,
)
from hpctrain.slurm.job import SQUEUE_FORMAT, JobInfo, parse_sacct, parse_scontrol_job, parse_squeue, sacct_argv
from hpctrain.slurm.values import SEPARATOR, node_names, read_moment, records, required

TIMEOUT_S = 60.0
"""Seconds that a call may take. With default settings a command gives up on an unreachable controller after 18 s; a
busy controller may need longer to answer."""

ACCOUNTING_TIMEOUT_S = 15.0
"""Seconds that a call to accounting may take: fewer than for the controller, because accounting is only a second
source."""

NO_COMMANDS = "no Slurm on the path (sbatch was not found)"
_CONFIGURE = "set SLURM_CONF to the cluster's slurm.conf, or load the site's Slurm module"

_INHERITED = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")
_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_JWT")

_UNKNOWN_JOB = "Invalid job id specified"
_UNKNOWN_TASK = " not found"
"""What `scontrol show job` prints on stdout for a task that the controller has forgotten while it knows the array."""
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
"""Parts of the error messages of 22.05 and 24.11 without a slurm.conf."""
_LATE = ("timed out", "Zero Bytes were transmitted", "no answer after")
"""Parts of the error messages of a command whose request may have reached the controller."""
_JOB_ID = re.compile(r"\d+([_+]\d+)?")
_STEP_ID = re.compile(r"\d+_\d+\.\d+", re.ASCII)
_ESTIMATE = re.compile(r"Job \d+ to start at (\S+) using \d+ processors on nodes (\S+)")
_PREFIX = re.compile(r"^(sbatch|scontrol|scancel|squeue): (error|fatal): ")


class ControllerUnreachableError(CommandError):
    """The Slurm controller does not answer; a later call may succeed."""


class NotConfiguredError(CommandError):
    """Slurm's commands are installed, but no configuration names a cluster."""


@dataclass(frozen=True)
class StartEstimate:
    """The result of `sbatch --test-only` for a script."""

    start_s: float | None
    """When the job would start, in seconds since 1970; None if sbatch does not say. It is years from now if earlier
    jobs have no time limit, or if a limit of an account or a QOS delays the job."""
    nodes: tuple[str, ...]
    """Names of the nodes on which the job would start; () if sbatch does not say."""
    problem: str | None
    """sbatch's own message if sbatch refuses the script; None if it accepts the script."""


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for Slurm's commands: without the variables with which a person or an enclosing job changes
    these commands, and with times printed in seconds since 1970.

    A person's SQUEUE_FORMAT would change the output that is parsed, and an enclosing job's SLURM_CPU_BIND the job that
    is submitted. The variables that locate the controller and authenticate to it stay.
    """
    variables = {
        name: value for name, value in environ.items() if name in _KEPT_VARIABLES or not name.startswith(_INHERITED)
    }
    return {**variables, "SLURM_TIME_FORMAT": "%s"}


class Slurm:
    """The Slurm that this machine is configured for, used through its commands.

    Unless its docstring says otherwise, a method raises ControllerUnreachableError (a CommandError) if the controller
    does not answer, NotConfiguredError (a CommandError) if no cluster is configured, CommandError with Slurm's message
    if Slurm refuses, CommandError if a command is missing or its answer cannot be parsed, and InputError if a given job
    id has not the form of one, such as '123' or '123_4'.
    """

    def __init__(self, runner: Runner, environ: Mapping[str, str] | None = None) -> None:
        self._runner = runner
        self._environ = os.environ if environ is None else environ
        self._config: ClusterConfig | None = None

    def available(self) -> bool:
        """Return whether sbatch is on the path and a cluster is configured; the controller is not asked. No error is
        raised."""
        return self.why_unavailable() is None

    def why_unavailable(self) -> str | None:
        """Return why Slurm cannot be used on this machine, and what to do; None if sbatch is on the path and a cluster
        is configured. The controller is not asked, and no error is raised."""
        try:
            # First, because a client looks for a missing file for a minute before it reports it.
            self._check_configuration()
            done = self._run(["sbatch", "--version"])
        except CommandError as error:
            return NO_COMMANDS if "not found" in str(error) else str(error)
        return None if done.code == 0 else f"sbatch --version: {_words(done)}"

    def job(self, job_id: str) -> JobInfo | None:
        """Return Slurm's description of a job; None if Slurm does not know the job. Slurm forgets a job MinJobAge
        seconds after its end."""
        done = self._run(["scontrol", "show", "job", "-o", _checked(job_id)])
        if done.code != 0 and (_UNKNOWN_JOB in done.stderr or _UNKNOWN_TASK in done.stdout):
            return None
        jobs = parse_scontrol_job(_answer(done))
        # For an array or a heterogeneous job, Slurm answers with its parts, of which one that has not ended counts.
        parts = sorted(jobs, key=lambda job: (job.job_id != job_id, job.is_ended))
        return parts[0] if parts else None

    def jobs(self, ids: Sequence[str]) -> dict[str, JobInfo]:
        """Return Slurm's description of each job in `ids`, by id, with one command; jobs that Slurm does not know are
        left out."""
        if not ids:
            return {}
        listed = ",".join(_checked(job_id) for job_id in ids)
        done = self._run(["squeue", "-h", "-r", "-t", "all", "-j", listed, "-O", SQUEUE_FORMAT])
        if done.code != 0 and _UNKNOWN_JOB in done.stderr:
            return {}
        return {job.job_id: job for job in parse_squeue(_answer(done))}

    def ended_jobs(self, ids: Sequence[str]) -> dict[str, JobInfo]:
        """Return accounting's description of those jobs in `ids` that have ended, by id; accounting also has jobs that
        the controller has forgotten.

        Many clusters have no accounting, or none that this machine can reach. The result is then {}, and no error is
        raised.
        """
        if not ids:
            return {}
        try:
            done = self._run(sacct_argv([_checked(job_id) for job_id in ids]), timeout_s=ACCOUNTING_TIMEOUT_S)
            return parse_sacct(done.stdout) if done.code == 0 else {}
        except CommandError:
            return {}

    def partitions(self, nodes: Sequence[NodeInfo] | None = None) -> list[Partition]:
        """Return the partitions that this user can see, with the GRES of their nodes.

        Args:
            nodes: the cluster's nodes, if they are known already; None: Slurm is asked for them.
        """
        text = _answer(self._run(["scontrol", "show", "partition", "-o"]))
        return parse_partitions(text, self.nodes() if nodes is None else nodes)

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes of the cluster."""
        return parse_nodes(_answer(self._run(["scontrol", "show", "node", "-o"])))

    def srun_has(self, option: str) -> bool:
        """Return whether srun knows an option, such as --container-image, which the plugin pyxis of a site adds."""
        return option in _answer(self._run(["srun", "--help"]))

    def config(self) -> ClusterConfig:
        """Return the cluster's settings that matter for a run. Slurm is asked only at the first call, because settings
        rarely change."""
        if self._config is None:
            self._config = parse_config(_answer(self._run(["scontrol", "show", "config"])))
        return self._config

    def state(self) -> ClusterState:
        """Return the cluster's settings, nodes and partitions."""
        nodes = self.nodes()
        return ClusterState(self.config(), nodes, self.partitions(nodes))

    def accounts(self, user: str) -> UserAccounts | None:
        """Return the accounts of a user on this cluster; None if the cluster has no accounting, or none that answers.

        No error about accounting is raised, because a run can be submitted without knowing the accounts.
        """
        cluster = self.config()["cluster"]
        try:
            done = self._run(sacctmgr_argv(user), timeout_s=ACCOUNTING_TIMEOUT_S)
        except CommandError:
            return None
        return parse_accounts(done.stdout, cluster) if done.code == 0 else None

    def cancel(self, job_id: str) -> None:
        """Cancel the job; nothing happens if the job has ended or Slurm does not know it."""
        _answer(self._run(["scancel", _checked(job_id)]))

    def signal(self, job_id: str, name: str) -> bool:
        """Send the signal with this name, such as USR2 or TERM, to all processes of the job's steps.

        Returns:
            Whether the signal was sent; False if there is no such job, or the job has ended. False, too, for a task of
            an array that has no step at present.
        """
        # A task is signalled step by step. While other tasks of its array wait, Slurm (22.05 and 24.11) answers a
        # signal to the task with an error although it sent it, and scancel repeats it for two minutes.
        targets = self._steps(job_id) if "_" in job_id else [_checked(job_id)]
        if not targets:
            return False
        done = self._run(["scancel", f"--signal={name}", *targets])
        if done.code != 0 and _UNKNOWN_JOB in done.stderr:
            return False
        _answer(done)
        return True

    def _steps(self, job_id: str) -> list[str]:
        """Return the ids of the job's steps that srun started, such as '123_4.0'."""
        done = self._run(["squeue", "-h", "-s", "-j", _checked(job_id), "-O", f"StepID:{SEPARATOR}"])
        steps = (line.partition(SEPARATOR)[0].strip() for line in _answer(done).splitlines())
        return [step for step in steps if _STEP_ID.fullmatch(step)]

    def number(self, job_id: str) -> str:
        """Return the number by which srun knows the job; for a task of an array, this number differs from the array's
        id.

        Raises:
            CommandError: Slurm does not know the job.
        """
        if "_" not in job_id:
            return _checked(job_id)
        text = _answer(self._run(["scontrol", "show", "job", "-o", _checked(job_id)]))
        return required(next(records(text, "JobId"), {}), "JobId")

    def requeue(self, job_id: str) -> None:
        """Requeue a running or ended job. The job cannot start again for cred_expire seconds (AuthInfo; 120 by
        default).
        """
        _answer(self._run(["scontrol", "requeue", _checked(job_id)]))

    def release(self, job_id: str) -> None:
        """Release a held job."""
        _answer(self._run(["scontrol", "release", _checked(job_id)]))

    def update(self, job_id: str, **fields: str | int) -> None:
        """Change fields of a job with `scontrol update`, as in update("7", ExcNodeList="gpu[1-2]", TimeLimit=30)."""
        changes = [f"{field}={value}" for field, value in fields.items()]
        _answer(self._run(["scontrol", "update", f"JobId={_checked(job_id)}", *changes]))

    def submit(self, script: Path, options: Sequence[str] = ()) -> str:
        """Submit a script with sbatch and return its job's id.

        Args:
            options: options of sbatch; they override the script's #SBATCH lines.
        """
        done = self._run(["sbatch", "--parsable", *options, str(script)], {"SLURM_TIME_FORMAT"})
        return _checked(_answer(done).strip().partition(";")[0])

    def queued_behind(self, script: Path, job_id: str) -> list[str]:
        """Return the ids of this user's waiting jobs that run `script` and have a dependency on the end of the job
        `job_id`."""
        columns = ("JobID", "Dependency", "Command")
        shape = ",".join(f"{column}:{SEPARATOR}" for column in columns)
        lines = _answer(self._run(["squeue", "-h", "--me", "-t", "PENDING", "-O", shape])).splitlines()
        rows = [line.split(SEPARATOR) for line in lines]
        waits = re.compile(rf"(^|,)afterany:{re.escape(_checked(job_id))}(\(|,|$)")
        return [
            values[0].strip()
            for values in rows
            if len(values) > len(columns) and waits.search(values[1]) and values[2].strip() == str(script)
        ]

    def jobs_of_scripts_in(self, folder: Path) -> list[str]:
        """Return the ids of this user's jobs that have not ended and whose script lies in `folder` or below; of a job
        array, the id of the array."""
        shape = ",".join(f"{column}:{SEPARATOR}" for column in ("JobArrayID", "Command"))
        lines = _answer(self._run(["squeue", "-h", "--me", "-O", shape])).splitlines()
        rows = [line.split(SEPARATOR) for line in lines]
        inside = [row[0].strip() for row in rows if len(row) > 1 and Path(row[1].strip()).is_relative_to(folder)]
        return list(dict.fromkeys(_checked(job.partition("_")[0]) for job in inside))

    def test_only(self, script: Path, options: Sequence[str] = ()) -> StartEstimate:
        """Return when and on which nodes sbatch expects the job of a script to start, or why sbatch refuses it; nothing
        is queued.

        Args:
            options: options of sbatch; they override the script's #SBATCH lines.
        """
        done = self._run(["sbatch", "--test-only", *options, str(script)])
        if done.code != 0:
            return StartEstimate(None, (), _words(done))
        estimate = _ESTIMATE.search(done.stderr)
        if not estimate:
            return StartEstimate(None, (), None)
        return StartEstimate(read_moment(estimate[1]), node_names(estimate[2]), None)

    def _run(self, argv: Sequence[str], without: Collection[str] = (), timeout_s: float = TIMEOUT_S) -> CommandResult:
        """Run one of Slurm's commands and return its result, whatever its exit code.

        Args:
            without: variables to leave out of the command's environment.

        Raises:
            ControllerUnreachableError: the controller does not answer.
            NotConfiguredError: no cluster is configured.
            CommandError: the command is not on the path.
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
            problem = f"Slurm's commands are here and find no cluster: {unset} ({_words(done)})"
            raise NotConfiguredError(f"{problem}; {_CONFIGURE}")
        if done.code != 0 and any(text in done.stderr for text in _AWAY):
            raise ControllerUnreachableError(f"the Slurm controller is away ({_words(done)}); ask again later")
        return done

    def _check_configuration(self) -> str | None:
        """Return the value of the variable SLURM_CONF; None if it is not set.

        Raises:
            NotConfiguredError: the variable names no file.
        """
        conf = self._environ.get("SLURM_CONF")
        if conf and not _is_file(Path(conf)):
            raise NotConfiguredError(f"SLURM_CONF: {conf}: there is no such file; {_CONFIGURE}")
        return conf


def may_be_done(error: BaseException) -> bool:
    """Return whether Slurm may have done what a command asked for, although the command ended with `error`: the error
    neither is Slurm's refusal, nor says that Slurm was never reached."""
    return not isinstance(error, CommandError) or any(text in str(error) for text in _LATE)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # a folder above it may not be entered


def _checked(job_id: str) -> str:
    """Return `job_id` if it has the form of a job id, which no command can take for an option or a list.

    Raises:
        InputError: the text has another form.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise InputError(f"job id: found '{job_id}'; allowed: a number, or number_task for one task of an array")
    return job_id


def _answer(done: CommandResult) -> str:
    if done.code != 0:
        raise CommandError(f"{' '.join(done.argv[:3])}: {_words(done)}")
    return done.stdout


def _words(done: CommandResult) -> str:
    """Return the stderr of a failed command as one line, without repeated lines."""
    lines = [_PREFIX.sub("", line.strip()) for line in done.stderr.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines)) or f"exit code {done.code} and no message"
