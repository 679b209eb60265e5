"""slurm.conf and cgroup.conf of a lab, as text. Pure. slurm.conf(5) and cgroup.conf(5) explain each key."""

from __future__ import annotations

from hpctrain.lab.layout import LabLayout
from hpctrain.lab.spec import LabPartition

CONTROLLER_PORT = 16817
"""Differs from Slurm's default 6817, because this machine may be part of a cluster."""
NODE_PORT = 16818


def slurm_conf(layout: LabLayout, hostname: str) -> str:
    """Return the text of slurm.conf.

    Args:
        hostname: this machine's short host name; slurmctld does not start under another.
    """
    sections = [
        _controller(layout, hostname),
        _files(layout),
        _behaviour(layout),
        [_node_line(layout, name) for name in layout.names],
        [_partition_line(partition) for partition in layout.spec.partitions],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def cgroup_conf(version: tuple[int, int]) -> str:
    """Return the text of cgroup.conf, which keeps Slurm off the host's cgroups as far as its version allows.

    The lab's nodes share these cgroups.
    """
    if version >= (24, 5):
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=autodetect\nIgnoreSystemd=yes\n"


def _controller(layout: LabLayout, hostname: str) -> list[str]:
    slurm = layout.spec.slurm
    return [
        "ClusterName=lab",
        f"SlurmctldHost={hostname}({layout.spec.controller()})",
        f"SlurmctldPort={CONTROLLER_PORT}",
        f"SlurmdPort={NODE_PORT}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket},cred_expire={slurm.cred_expire_s}",
    ]


def _files(layout: LabLayout) -> list[str]:
    folder = layout.folder
    return [
        f"StateSaveLocation={folder / 'ctld'}",
        f"SlurmctldLogFile={layout.logs / 'slurmctld.log'}",
        f"SlurmctldPidFile={folder / 'pid' / 'slurmctld.pid'}",
        f"SlurmdSpoolDir={folder / 'spool' / '%n'}",
        f"SlurmdLogFile={layout.logs / 'slurmd-%n.log'}",
        f"SlurmdPidFile={folder / 'pid' / 'slurmd-%n.pid'}",
    ]


def _behaviour(layout: LabLayout) -> list[str]:
    slurm, plugins = layout.spec.slurm, layout.slurm.plugins
    lines = [
        *([] if plugins is None else [f"PluginDir={plugins}"]),
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        f"TaskProlog={layout.task_prolog}",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        f"SlurmdTimeout={slurm.slurmd_timeout_s}",
        f"KillWait={slurm.kill_wait_s}",
        f"OverTimeLimit={slurm.over_time_limit_min}",
        "JobRequeue=1",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "SchedulerType=sched/backfill",
        # Slurm's default intervals suit thousands of jobs; in a lab a person waits.
        "SchedulerParameters=bf_interval=5,batch_sched_delay=1",
    ]
    if slurm.preempt_send_user_signal:
        lines.append("SlurmctldParameters=preempt_send_user_signal")
    return lines


def _node_line(layout: LabLayout, name: str) -> str:
    node, spec = layout.node(name), layout.spec
    memory_mb = (node.memory_bytes or spec.memory_bytes) // 2**20
    return (
        f"NodeName={name} NodeAddr={layout.address(name)} CPUs={node.cpus or spec.cpus} "
        f"RealMemory={memory_mb} State=UNKNOWN"
    )


def _partition_line(partition: LabPartition) -> str:
    words = [
        f"PartitionName={partition.name}",
        f"Nodes={','.join(partition.nodes) if partition.nodes else 'ALL'}",
        f"Default={'YES' if partition.default else 'NO'}",
        f"PriorityTier={partition.priority_tier}",
        f"PreemptMode={partition.preempt_mode.upper()}",
        f"GraceTime={partition.grace_time_s}",
        f"MaxTime={partition.max_time}",
    ]
    if partition.default_time is not None:
        words.append(f"DefaultTime={partition.default_time}")
    return " ".join([*words, "State=UP"])
