"""A tiny Slurm behind the Runner protocol: a job table, nodes, a clock that tests move, answers in Slurm's own text.

Tests hold its text against captured output of real clients (tests/golden/slurm), so that it cannot drift from it.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.errors import CommandError
from hpctrain.base.process import CommandResult
from hpctrain.slurm.values import SEPARATOR, format_time_limit, parse_time_limit

NO_ACCOUNTING = "Slurm accounting storage is disabled\n"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
UNKNOWN = "slurm_load_jobs error: Invalid job id specified\n"
MIN_JOB_AGE_S = 300
CRED_EXPIRE_S = 10
MAX_ARRAY_SIZE = 1001
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@dataclass(frozen=True)
class FakeJob:
    """A row of the job table."""

    job_id: int
    nodes_wanted: int
    partition: str
    time_limit_s: int | None
    requeue: bool
    submit_s: int
    begin_s: int
    script: str
    state: str = "PENDING"
    reason: str = "None"
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    start_s: int | None = None
    end_s: int | None = None
    preempt_s: int | None = None
    exit_code: int = 0
    exit_signal: int = 0
    array: tuple[int, int] | None = None
    """Of a task of a job array: the array's id and the task's number."""
    array_limit: int | None = None
    dependency: str = ""
    exclude: str = ""
    """Changed while it waits; the schedule here does not look at it."""

    @property
    def name(self) -> str:
        """Its id as squeue shows it."""
        return f"{self.array[0]}_{self.array[1]}" if self.array else str(self.job_id)


class FakeSlurm:
    """Runs jobs first come, first served on whole nodes. `away`, `installed` and `accounting` (what sacct answers, None
    where there is no accounting) are for tests to change."""

    def __init__(self, nodes: Iterable[str] = ("gpu1", "gpu2", "gpu3"), now: int = 1_795_000_000) -> None:
        self.now = now
        self.away = False
        self.installed = True
        self.accounting: str | None = None
        self.jobs: dict[int, FakeJob] = {}
        self.node_states = dict.fromkeys(nodes, "IDLE")
        self.argvs: list[tuple[str, ...]] = []
        self.envs: list[Mapping[str, str] | None] = []
        self.signals: list[tuple[int, str]] = []

    # What tests do to it.

    def submit(self, *options: str) -> str:
        """A job by sbatch's options; its id."""
        return self._sbatch(["sbatch", "--parsable", *options]).stdout.strip()

    def advance(self, seconds: int) -> None:
        """Let time pass: limits run out, pauses end, old jobs are forgotten, free nodes are given out."""
        self.now += seconds
        for job in list(self.jobs.values()):
            if job.state == "RUNNING" and job.end_s is not None and job.end_s <= self.now:
                self._end(job, "TIMEOUT", exit_signal=15, reason="TimeLimit")
            elif job.state in ENDED and self.now - (job.end_s or 0) > MIN_JOB_AGE_S:
                del self.jobs[job.job_id]
        self._schedule()

    def finish(self, job_id: str, code: int = 0) -> None:
        """The batch script ends by itself."""
        job = self.jobs[self._number(job_id)]
        if code:
            self._end(job, "FAILED", code, reason="NonZeroExitCode")
        else:
            self._end(job, "COMPLETED")

    def preempt(self, job_id: str) -> None:
        """A job of higher priority takes the nodes."""
        self._interrupt(self.jobs[self._number(job_id)], "PREEMPTED")

    def fail_node(self, name: str) -> None:
        """The node goes down with whatever runs on it."""
        self.node_states[name] = "DOWN+NOT_RESPONDING"
        for job in [job for job in self.jobs.values() if job.state == "RUNNING" and name in job.nodes]:
            self._interrupt(job, "NODE_FAIL")

    # The Runner protocol.

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        self.argvs.append(tuple(argv))
        self.envs.append(env)
        if not self.installed:
            raise CommandError(f"{argv[0]}: not found on the path")
        if argv[0] == "git":  # no part of Slurm, and no checkout
            return CommandResult(tuple(argv), 128, "", "fatal: not a git repository")
        if argv[1:] == ["--version"]:
            return self._reply(argv, "slurm-wlm 22.05.8\n")
        if argv[0] == "sacct":  # it asks a database, not the controller
            return self._reply(argv, self.accounting or "", error="" if self.accounting else NO_ACCOUNTING)
        if self.away:
            return self._reply(argv, error=AWAY)
        clients = {
            "sbatch": self._sbatch,
            "squeue": self._squeue,
            "scontrol": self._scontrol,
            "scancel": self._scancel,
            "sinfo": self._sinfo,
            "srun": self._srun,
        }
        if argv[0] not in clients:  # git and the like are not here
            raise CommandError(f"{argv[0]}: not found on the path")
        return clients[argv[0]](list(argv))

    def start(self, argv, env=None, log=None, keep_fds=()):
        raise CommandError(f"{argv[0]}: the fake Slurm starts no processes")

    def replace_process(self, argv, env):
        """srun as the last word of a process: it is remembered, and ends with exit code 7."""
        self.argvs.append(tuple(argv))
        self.envs.append(env)
        raise SystemExit(7)

    def _number(self, name: str) -> int:
        """The key in the job table of a job's id, also of one like 12_3; 0 for an unknown one."""
        return next((number for number, job in self.jobs.items() if job.name == name), 0)

    def _named(self, name: str) -> list[FakeJob]:
        """The job of an id, or all tasks of an array."""
        return [job for job in self.jobs.values() if name in (job.name, *(str(part) for part in (job.array or ())[:1]))]

    # Its clients.

    def _sbatch(self, argv: list[str]) -> CommandResult:
        parser = argparse.ArgumentParser(exit_on_error=False)
        parser.add_argument("--parsable", action="store_true")
        parser.add_argument("--test-only", action="store_true")
        parser.add_argument("-N", "--nodes", default="1")
        parser.add_argument("-p", "--partition", default="low")
        parser.add_argument("-t", "--time", default="1:00:00")
        parser.add_argument("-H", "--hold", action="store_true")
        parser.add_argument("-d", "--dependency", default="")
        parser.add_argument("--no-requeue", action="store_true")
        parser.add_argument("-a", "--array", default="")
        parser.add_argument("-w", "--nodelist", default="")
        parser.add_argument("script", nargs="?", default="job.sh")
        script = next((word for word in argv[1:] if Path(word).is_file()), None)
        given, _ = parser.parse_known_args([*_directives(script), *argv[1:]])
        given.script = script or given.script
        if given.partition not in ("low", "high"):
            text = f"sbatch: error: invalid partition specified: {given.partition}\n"
            return self._reply(argv, error=text + "allocation failure: Invalid partition name specified\n")
        wanted = int(given.nodes.partition("-")[0])
        if wanted > len(self.node_states):
            return self._reply(argv, error="allocation failure: Requested node configuration is not available\n")
        number = max(self.jobs, default=0) + 1
        tasks, _, throttle = given.array.partition("%")
        last = int(tasks.rpartition("-")[2] or 0)
        if last >= MAX_ARRAY_SIZE:
            return self._reply(argv, error="allocation failure: Invalid job array specification\n")
        if given.test_only and 0 < len(NodeSet(given.nodelist)) < wanted:  # although sbatch takes the job
            return self._reply(argv, error="allocation failure: Requested node configuration is not available\n")
        if given.test_only:
            nodes = NodeSet.fromlist(list(self.node_states)[:wanted])
            text = f"sbatch: Job {number} to start at {self.now} using {wanted} processors on nodes {nodes}"
            return CommandResult(tuple(argv), 0, "", f"{text} in partition {given.partition}\n")
        limit = parse_time_limit(given.time)
        job = FakeJob(
            number, wanted, given.partition, limit, not given.no_requeue, self.now, self.now, str(given.script)
        )
        job = replace(job, dependency=given.dependency)
        job = replace(job, reason="JobHeldUser") if given.hold else job
        for task in range(last + 1) if tasks else ():
            # As in Slurm, the array's own number is left to its last task.
            own = number if task == last else number + 1 + task
            limit_of_tasks = int(throttle) if throttle else None
            self.jobs[own] = replace(job, job_id=own, array=(number, task), array_limit=limit_of_tasks)
        if not tasks:
            self.jobs[number] = job
        self._schedule()
        return self._reply(argv, f"{number}\n" if given.parsable else f"Submitted batch job {number}\n")

    def _squeue(self, argv: list[str]) -> CommandResult:
        if "-s" in argv:
            name = argv[argv.index("-j") + 1]
            running = [job for job in self._named(name) if job.state == "RUNNING"]
            lines = [f"{job.name}.{step}{SEPARATOR}\n" for job in running for step in ("0", "batch")]
            return self._reply(argv, "".join(lines))
        jobs = list(self.jobs.values())
        if "-j" in argv:
            ids = argv[argv.index("-j") + 1].split(",")
            jobs = [job for job in jobs if {job.name, str((job.array or (job.job_id,))[0])} & set(ids)]
            if not jobs and len(ids) == 1:
                return self._reply(argv, error=UNKNOWN)
        if "-t" not in argv:
            jobs = [job for job in jobs if job.state not in ENDED]
        elif argv[argv.index("-t") + 1] != "all":
            jobs = [job for job in jobs if job.state == argv[argv.index("-t") + 1]]
        columns = [column.partition(":") for column in argv[argv.index("-O") + 1].split(",")]
        lines = ["".join(_column(job, name) + suffix for name, _, suffix in columns) for job in jobs]
        return self._reply(argv, "".join(f"{line}\n" for line in lines))

    def _scontrol(self, argv: list[str]) -> CommandResult:
        verb, *rest = argv[1:]
        if verb == "show":
            return self._show(argv, rest[0], rest[-1])
        number = rest[0].removeprefix("JobId=")
        job = self.jobs.get(self._number(number))
        if job is None:
            return self._reply(argv, error=f"Invalid job id specified for job {number}\n")
        if verb == "requeue":
            if job.state == "PENDING":
                return self._reply(argv, error=f"Job is pending execution for job {number}\n")
            self._requeue(job)
        elif verb in ("hold", "release"):
            self.jobs[job.job_id] = replace(job, reason="JobHeldUser" if verb == "hold" else "None")
        elif verb == "update":
            return self._update(argv, job, dict(change.split("=", 1) for change in rest[1:]))
        self._schedule()
        return self._reply(argv)

    def _update(self, argv: list[str], job: FakeJob, changes: dict[str, str]) -> CommandResult:
        for field, value in changes.items():
            if field == "Dependency":
                job = replace(job, dependency=value)
            elif field == "TimeLimit":
                job = replace(job, time_limit_s=parse_time_limit(value))
            elif field == "ExcNodeList" and job.state == "PENDING":
                job = replace(job, exclude=value)
            elif field == "Requeue":
                job = replace(job, requeue=value == "1")
            else:
                text = f"Update of this parameter is not supported: {field}={value}\nRequest aborted\n"
                return self._reply(argv, error=text)
            self.jobs[job.job_id] = job
        self._schedule()
        return self._reply(argv)

    def _show(self, argv: list[str], what: str, name: str) -> CommandResult:
        if what == "job":
            lines = [_job_line(job) for job in self._named(name)]
            return self._reply(argv, "".join(f"{line}\n" for line in lines), error="" if lines else UNKNOWN)
        lines = {"node": self._node_lines, "partition": self._partition_lines, "config": _config_lines}[what]()
        return self._reply(argv, "".join(f"{line}\n" for line in lines))

    def _scancel(self, argv: list[str]) -> CommandResult:
        replies = [self._cancel_one(argv, job) for job in self._named(argv[-1].partition(".")[0]) or [None]]
        return max(replies, key=lambda reply: reply.code)

    def _cancel_one(self, argv: list[str], job: FakeJob | None) -> CommandResult:
        named = [word.removeprefix("--signal=") for word in argv if word.startswith("--signal=")]
        alive = job is not None and job.state not in ENDED
        if named and not alive:
            text = f"scancel: error: Kill job error on job id {argv[-1]}: Invalid job id specified\n"
            return self._reply(argv, error=text)
        if job is not None and alive:
            if named:
                self.signals.append((job.job_id, named[0]))
            else:
                self._end(job, "CANCELLED", exit_signal=15 if job.state == "RUNNING" else 0, reason=job.reason)
        return self._reply(argv)

    def _sinfo(self, argv: list[str]) -> CommandResult:
        return self._reply(argv, "".join(f"{node}|{state}\n" for node, state in self.node_states.items()))

    def _srun(self, argv: list[str]) -> CommandResult:
        assert argv == ["srun", "--help"], "the fake Slurm starts no steps"
        return self._reply(argv, "Usage: srun [OPTIONS(0)... [executable(0) [args(0)...]]]\n")

    # Its insides.

    def _schedule(self) -> None:
        ahead = False
        for job in list(self.jobs.values()):
            if job.state != "PENDING" or job.reason == "JobHeldUser":
                continue
            if job.begin_s > self.now:
                self.jobs[job.job_id] = replace(job, reason="BeginTime")
                continue
            waits = self._waits(job)
            if waits:
                self.jobs[job.job_id] = replace(job, reason=waits)
                continue
            others = [other for other in self.jobs.values() if job.array and (other.array or ())[:1] == job.array[:1]]
            if job.array_limit and sum(other.state == "RUNNING" for other in others) >= job.array_limit:
                self.jobs[job.job_id] = replace(job, reason="JobArrayTaskLimit")
                continue
            free = [node for node, state in self.node_states.items() if state == "IDLE"]
            if ahead or len(free) < job.nodes_wanted:
                self.jobs[job.job_id] = replace(job, reason="Priority" if ahead else "Resources")
                ahead = True
                continue
            nodes = tuple(free[: job.nodes_wanted])
            self.node_states.update(dict.fromkeys(nodes, "ALLOCATED"))
            end = None if job.time_limit_s is None else self.now + job.time_limit_s
            self.jobs[job.job_id] = replace(
                job, state="RUNNING", reason="None", nodes=nodes, start_s=self.now, end_s=end
            )

    def _waits(self, job: FakeJob) -> str:
        """Why a job's dependency (afterok or afterany, on all of the jobs named) keeps it, "" once it does not."""
        kind, *ids = job.dependency.split(":")
        states = [job.state for name in ids for job in self._named(name)]
        if kind == "afterok" and any(state in ENDED and state != "COMPLETED" for state in states):
            return "DependencyNeverSatisfied"
        return "Dependency" if any(state not in ENDED for state in states) else ""

    def _interrupt(self, job: FakeJob, state: str) -> None:
        if job.requeue:
            self._requeue(job)
        else:
            self._end(job, state, reason="NodeDown" if state == "NODE_FAIL" else "None")

    def _requeue(self, job: FakeJob) -> None:
        self._free(job)
        begin = self.now + CRED_EXPIRE_S
        self.jobs[job.job_id] = replace(
            job, state="PENDING", reason="BeginTime", nodes=(), restarts=job.restarts + 1, submit_s=self.now,
            begin_s=begin, start_s=begin, end_s=None, exit_code=0, exit_signal=0,
        )  # fmt: skip
        self._schedule()

    def _end(self, job: FakeJob, state: str, exit_code: int = 0, exit_signal: int = 0, reason: str = "None") -> None:
        self._free(job)
        self.jobs[job.job_id] = replace(
            job, state=state, reason=reason, start_s=job.start_s or self.now, end_s=self.now,
            exit_code=exit_code, exit_signal=exit_signal,
        )  # fmt: skip
        self._schedule()

    def _free(self, job: FakeJob) -> None:
        if job.state == "RUNNING":
            self.node_states.update({node: "IDLE" for node in job.nodes if self.node_states[node] == "ALLOCATED"})

    def _node_lines(self) -> list[str]:
        return [
            f"NodeName={name} Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=16 CPUTot=16 CPULoad=0.10 "
            f"Gres=gpu:a100:4(S:0-1) NodeAddr={name} NodeHostName={name} Version=22.05.8 RealMemory=64000 "
            f"AllocMem=0 FreeMem=60000 Sockets=16 Boards=1 State={state} ThreadsPerCore=1 Partitions=low,high "
            for name, state in self.node_states.items()
        ]

    def _partition_lines(self) -> list[str]:
        count, nodes = len(self.node_states), NodeSet.fromlist(list(self.node_states))
        shape = "PartitionName={} AllowAccounts=ALL AllowQos=ALL Default={} QoS=N/A DefaultTime={} GraceTime={} "
        shape += (
            f"MaxNodes=UNLIMITED MaxTime={{}} MinNodes=0 Nodes={nodes} PriorityTier={{}} PreemptMode={{}} State=UP "
        )
        shape += f"TotalCPUs={16 * count} TotalNodes={count}"
        return [
            shape.format("low", "YES", "01:00:00", 20, "2-00:00:00", 1, "REQUEUE"),
            shape.format("high", "NO", "NONE", 0, "UNLIMITED", 10, "OFF"),
        ]

    @staticmethod
    def _reply(argv: Sequence[str], text: str = "", error: str = "") -> CommandResult:
        return CommandResult(tuple(argv), 1 if error else 0, text, error)


def _directives(script: str | None) -> list[str]:
    lines = Path(script).read_text().splitlines() if script else []
    return [word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]


def _moment(value: int | None, none: str) -> str:
    return none if value is None else str(value)


def _node_list(job: FakeJob) -> str:
    return str(NodeSet.fromlist(list(job.nodes)))


def _column(job: FakeJob, name: str) -> str:
    return {
        "JobID": str(job.job_id),
        "JobArrayID": job.name,
        "State": job.state,
        "Reason": job.reason,
        "NodeList": _node_list(job),
        "RestartCnt": str(job.restarts),
        "StartTime": _moment(job.start_s, "N/A"),
        "EndTime": _moment(job.end_s, "N/A"),
        "TimeLimit": format_time_limit(job.time_limit_s),
        "EligibleTime": str(job.begin_s),
        "PreemptTime": _moment(job.preempt_s, "N/A"),
        "BatchHost": job.nodes[0] if job.nodes else "n/a",
        "exit_code": str((job.exit_code << 8) + job.exit_signal),
        "Partition": job.partition,
        "SubmitTime": str(job.submit_s),
        "Dependency": ",".join(_dependencies(job)) or "(null)",
        "Command": job.script,
    }[name]


def _dependencies(job: FakeJob) -> list[str]:
    kind, *ids = job.dependency.split(":")
    return [f"{kind}:{number}(unfulfilled)" for number in ids]


def _job_line(job: FakeJob) -> str:
    host = f"BatchHost={job.nodes[0]} " if job.nodes else ""
    array = f"ArrayJobId={job.array[0]} ArrayTaskId={job.array[1]} " if job.array else ""
    return (
        f"JobId={job.job_id} {array}JobName={Path(job.script).name} UserId=anna(1000) GroupId=anna(1000) MCS_label=N/A "
        f"Priority=1 Nice=0 Account=(null) QOS=(null) JobState={job.state} Reason={job.reason} "
        f"Dependency={job.dependency or '(null)'} Requeue={int(job.requeue)} "
        f"Restarts={job.restarts} BatchFlag=1 ExitCode={job.exit_code}:{job.exit_signal} "
        f"TimeLimit={format_time_limit(job.time_limit_s)} SubmitTime={job.submit_s} EligibleTime={job.begin_s} "
        f"StartTime={_moment(job.start_s, 'Unknown')} EndTime={_moment(job.end_s, 'Unknown')} "
        f"PreemptTime={_moment(job.preempt_s, 'None')} Partition={job.partition} NodeList={_node_list(job)} {host}"
        f"NumNodes={job.nodes_wanted} Command={job.script} WorkDir=/home/anna "
    )


def _config_lines() -> list[str]:
    return [
        "Configuration data as of 1795000000",
        "AccountingStorageType   = accounting_storage/none",
        f"AuthInfo                = cred_expire={CRED_EXPIRE_S}",
        "ClusterName             = fake",
        "JobRequeue              = 1",
        "KillWait                = 5 sec",
        f"MaxArraySize            = {MAX_ARRAY_SIZE}",
        "MessageTimeout          = 10 sec",
        f"MinJobAge               = {MIN_JOB_AGE_S} sec",
        "OverTimeLimit           = 0 min",
        "PreemptMode             = REQUEUE",
        "PreemptType             = preempt/partition_prio",
        "SlurmctldParameters     = (null)",
        "SlurmdTimeout           = 10 sec",
        "SLURM_VERSION           = 22.05.8",
    ]
