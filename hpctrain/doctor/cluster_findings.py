"""What a cluster's settings and partitions mean for a run. Its functions are pure: from facts to findings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial

from hpctrain.base.units import format_seconds
from hpctrain.doctor.facts import DoctorFinding, Level, SlurmFacts, SlurmUnavailable
from hpctrain.jobs.partition_checks import SIGNAL_EARLY_S, can_be_preempted
from hpctrain.records.run.cluster import Cluster
from hpctrain.records.run.recovery import Recovery
from hpctrain.slurm.cluster import ClusterConfig, NodeInfo, Partition
from hpctrain.slurm.limits import members
from hpctrain.slurm.values import format_time_limit

LONG_PAUSE_S = 60
"""If Slurm lets a requeued job wait for at least so many seconds, the doctor reports the wait as a disadvantage."""
NOTICE_S = int(Cluster.model_fields["save_notice_s"].default)
HEARTBEAT_S = float(Recovery.model_fields["heartbeat_timeout_s"].default)
HELD_WORDS = (
    "after so many failed starts Slurm holds the job; `hpctrain status` says so, `scontrol release JOB` frees it"
)
_slurm = partial(DoctorFinding, "Slurm")
_in_partitions = partial(DoctorFinding, "partitions")
_MIG = re.compile(r"\d+g\.\d+gb")


def slurm_findings(slurm: SlurmFacts | SlurmUnavailable) -> list[DoctorFinding]:
    """Return findings about the cluster: its version, its settings that affect a run, and its partitions.

    If Slurm cannot be asked, the only finding says why.
    """
    if isinstance(slurm, SlurmUnavailable):
        return [_no_slurm(slurm)]
    config = slurm.config
    preempting = any(_can_be_preempted(partition, slurm) for partition in slurm.partitions)
    return [
        _version(config),
        _slurmd_timeout(config["slurmd_timeout_s"]),
        _requeue_pause(config["cred_expire_s"]),
        _preemption(config, preempting),
        *([_preempt_signal(config["preempt_send_user_signal"])] if preempting else []),
        _kill_wait(config),
        _job_requeue(config["job_requeue"]),
        _failed_starts(config),
        _topology(config["topology_plugin"]),
        _accounting(config),
        *_partition_findings(slurm),
    ]


def _version(config: ClusterConfig) -> DoctorFinding:
    """Return the finding, of level `ok`, that gives Slurm's version and the name of the cluster, and says that the
    controller answers."""
    return _slurm("version", "ok", config["version"], f"cluster '{config['cluster']}'; its controller answers")


def _failed_starts(config: ClusterConfig) -> DoctorFinding:
    """Return the finding, of level `ok`, that says after how many failed starts Slurm holds a job."""
    return _slurm("MaxBatchRequeue", "ok", str(config["max_batch_requeue"]), HELD_WORDS)


def _no_slurm(slurm: SlurmUnavailable) -> DoctorFinding:
    """Return the finding that says why Slurm cannot be asked. Level `note` on a machine where Slurm is not installed or
    not configured; `problem` if its controller does not answer.
    """
    instead = "`hpctrain train --local N` runs on this machine"
    if not slurm.installed:
        return _slurm("commands", "note", "not on the path", f"nothing can be submitted; {instead}")
    if not slurm.configured:
        words = f"nothing can be submitted: {slurm.reason}; {instead}"
        todo = "where there is a cluster, set SLURM_CONF"
        return _slurm("controller", "note", "not configured", words, todo)
    words = f"`hpctrain submit` would fail: {slurm.reason}"
    return _slurm("controller", "problem", "cannot be asked", words, f"try again later, or ask the site; {instead}")


def _slurmd_timeout(seconds: int) -> DoctorFinding:
    """Return the finding that says after how many seconds Slurm takes a silent node for dead. Level `note` for 0, with
    which Slurm never does; else `ok`.
    """
    ours = f"hpctrain's own agents notice within {format_seconds(HEARTBEAT_S)} (recovery.heartbeat_timeout_s)"
    if seconds == 0:
        words = f"Slurm never gives up a silent node, and its job stays; {ours} and go on without it"
        return _slurm("SlurmdTimeout", "note", "0", words)
    words = f"after that Slurm takes a silent node for dead, ends its job and requeues it; {ours} and go on until then"
    return _slurm("SlurmdTimeout", "ok", f"{seconds} s", words)


def _requeue_pause(seconds: int) -> DoctorFinding:
    """Return the finding that says how many seconds a requeued job waits before it may start again. Level `note` from
    `LONG_PAUSE_S` on, else `ok`.
    """
    level: Level = "note" if seconds >= LONG_PAUSE_S else "ok"
    words = f"a requeue waits {seconds} s here before its job may start again (AuthInfo)"
    return _slurm("cred_expire", level, f"{seconds} s", words)


def _preemption(config: ClusterConfig, preempting: bool) -> DoctorFinding:
    """Return the finding that says whether jobs are ended or suspended to make room for others, and whether they
    continue later. Level `note` if jobs may be preempted, else `ok`.

    Args:
        preempting: whether jobs of any partition may be preempted.
    """
    name = "PreemptType, PreemptMode"
    mode = config["preempt_mode"]
    value = f"{config['preempt_type'].removeprefix('preempt/')}, {mode}"
    if not preempting:
        return _slurm(name, "ok", value, "no job is ended to make room for another one")
    words = "jobs may be ended to make room for others"
    if "CANCEL" in mode:
        words += "; Slurm does not bring them back, hpctrain asks for it while it saves"
        return _slurm(name, "note", value, words, "where that was too late: hpctrain resubmit RUN")
    if "REQUEUE" in mode:
        words += "; Slurm puts them back into the queue and they go on from their last checkpoint"
    elif "SUSPEND" in mode:
        words = "jobs may be stopped in place for others; a run that wakes up may have to start its workers again"
    return _slurm(name, "note", value, words)


def _preempt_signal(sent: bool) -> DoctorFinding:
    """Return the finding, of level `ok`, that says which signal tells a preempted job to save (PreemptParameters).

    Args:
        sent: whether a preempted job gets the signal of `sbatch --signal`.
    """
    words = "a preempted job gets " + ("the notice to save (SIGUSR2)" if sent else "SIGTERM and no other notice")
    words += "; the agents save at either, in the partition's GraceTime"
    return _slurm("send_user_signal", "ok", "set" if sent else "not set", words)


def _kill_wait(config: ClusterConfig) -> DoctorFinding:
    """Return the finding, of level `ok`, that says how long a job has between SIGTERM and SIGKILL at its time limit,
    and how long it may run over the limit.
    """
    words = "between SIGTERM and SIGKILL at the time limit; hpctrain has saved by then: it is told "
    words += f"{NOTICE_S} s before the limit (cluster.save_notice_s)"
    over = config["over_time_limit_s"]
    if over != 0:
        words += f"; jobs may run {'for ever' if over is None else f'{over} s'} over their limit (OverTimeLimit)"
    return _slurm("KillWait", "ok", f"{config['kill_wait_s']} s", words)


def _job_requeue(on: bool) -> DoctorFinding:
    """Return the finding, of level `ok`, that says whether Slurm requeues a job after a node failure if the job does
    not ask for it.
    """
    words = "jobs go back into the queue after a node failure "
    words += "unless they say otherwise" if on else "only when they ask for it, as hpctrain's do (--requeue)"
    return _slurm("JobRequeue", "ok", "1" if on else "0", words)


def _topology(plugin: str) -> DoctorFinding:
    """Return the finding, of level `ok`, that says whether Slurm knows which nodes lie close to each other."""
    words = "Slurm knows which nodes lie close, and gives a job close ones"
    if plugin in ("none", "default", "flat"):
        words = "Slurm does not know which nodes lie close, a job gets any; the probe measures those that it got"
    return _slurm("TopologyPlugin", "ok", plugin, words)


def _accounting(config: ClusterConfig) -> DoctorFinding:
    """Return the finding that says how long Slurm knows ended jobs. Level `note` without accounting, else `ok`."""
    age = format_seconds(config["min_job_age_s"])
    if config["accounting"]:
        words = f"sacct knows ended jobs; the controller forgets them after {age} (MinJobAge)"
        return _slurm("accounting", "ok", "on", words)
    words = f"Slurm forgets an ended job after {age} (MinJobAge); what became of a run stays in its folder"
    return _slurm("accounting", "note", "none", words)


def _partition_findings(slurm: SlurmFacts) -> list[DoctorFinding]:
    """Return a finding for each partition. If no partition can run a job, a last finding of level `problem` says so."""
    findings = [_partition(partition, slurm) for partition in slurm.partitions]
    if not any(partition.state == "UP" and _ready(partition, slurm) for partition in slurm.partitions):
        words = "no partition that you see is up and has a node that takes jobs: a job would only wait"
        findings.append(_in_partitions("all", "problem", "none is ready", words, "ask the site"))
    return findings


def _partition(partition: Partition, slurm: SlurmFacts) -> DoctorFinding:
    """Return the finding about nodes, GPUs and limits of a partition. Level `note` if it takes no jobs, its time limits
    are short, or its jobs may be preempted; else `ok`.
    """
    ready, there = _ready(partition, slurm), members(partition, slurm.nodes)
    out = len(there) - len(ready)
    value = _nodes(partition.nodes_total)
    if out:
        value += f", {out} out of service"
    value += f"; {_gpus(there)}"
    warnings = [*_closed(partition, ready), *_too_short(partition), *_preempted(partition, slurm)]
    words = "; ".join([*_limits(partition), *warnings])
    default = " (default)" if partition.default else ""
    return _in_partitions(f"{partition.name}{default}", "note" if warnings else "ok", value, words)


def _can_be_preempted(partition: Partition, slurm: SlurmFacts) -> bool:
    return can_be_preempted(slurm.config["preempt_type"], partition, slurm.partitions)


def _ready(partition: Partition, slurm: SlurmFacts) -> list[NodeInfo]:
    return [node for node in members(partition, slurm.nodes) if node.accepts_jobs]


def _gpus(nodes: Sequence[NodeInfo]) -> str:
    """Return a text with the GPUs of the nodes, by kind and number on a node: '4 x a100 on 3 nodes, 2 x a100_3g.20gb
    (MIG slices) on 1 node'.
    """
    counts = Counter((item.count, item.type) for node in nodes for item in node.gres if item.name == "gpu")
    if not counts:
        return "no GPUs"
    parts = []
    for (count, kind), on in counts.items():
        mig = " (MIG slices)" if kind and _MIG.search(kind) else ""
        parts.append(f"{count} x {kind or 'GPU of no named type'}{mig} on {_nodes(on)}")
    return ", ".join(parts)


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _limits(partition: Partition) -> list[str]:
    limit, default = partition.time_limit_s, partition.default_time_s
    words = f"up to {format_time_limit(limit)}" if limit is not None else "no time limit"
    if default is not None and default != limit:
        words += f" ({format_time_limit(default)} for a job that names no time)"
    limits = [words]
    if partition.max_nodes is not None:
        limits.append(f"at most {_nodes(partition.max_nodes)} a job")
    if partition.allow_accounts is not None:
        limits.append(f"accounts {', '.join(partition.allow_accounts)} only")
    if partition.allow_qos is not None:
        limits.append(f"QOS {', '.join(partition.allow_qos)} only")
    return limits


def _closed(partition: Partition, ready: Sequence[NodeInfo]) -> list[str]:
    if partition.state != "UP":
        return [f"it is {partition.state}: its jobs do not start now"]
    return [] if ready else ["none of its nodes takes jobs now"]


def _too_short(partition: Partition) -> list[str]:
    given, least = partition.default_time_s or partition.time_limit_s, NOTICE_S + SIGNAL_EARLY_S
    if given is None or given > least:
        return []
    if partition.time_limit_s is not None and partition.time_limit_s <= least:
        return [
            f"too short for a run: the notice to save comes {NOTICE_S} s before the end; lower cluster.save_notice_s"
        ]
    return ["a job that names no time gets too little to train: give cluster.time"]


def _preempted(partition: Partition, slurm: SlurmFacts) -> list[str]:
    mode = partition.preempt_mode
    if mode == "OFF" or not _can_be_preempted(partition, slurm):
        return []
    if "SUSPEND" in mode:
        return ["its jobs may be suspended for others"]
    end = "cancelled" if "CANCEL" in mode else "requeued"
    if partition.grace_s:
        return [f"its jobs may be {end} for others, {partition.grace_s} s after the notice to save (GraceTime)"]
    return [
        f"its jobs may be {end} for others at once (GraceTime 0): the steps since the last checkpoint are lost, so "
        "keep checkpoint.every small"
    ]
