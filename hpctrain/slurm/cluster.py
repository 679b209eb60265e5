"""Parsers of scontrol's description of the cluster, and what they return: partitions, nodes with their GRES and
features, and the settings that matter for a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from hpctrain.slurm.billing import BillingRule, billing_rule, parse_billing_weights
from hpctrain.slurm.values import node_names, number, parse_unsigned, read_duration, records, required, text_or_none

_OUTSIDE_BRACKETS = re.compile(r",(?![^(]*\))")
_BRACKETS = re.compile(r"\([^)]*\)")
_COUNT = re.compile(r"(\d{1,18})([KMGTP]?)", re.IGNORECASE | re.ASCII)
_FACTOR = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


@dataclass(frozen=True)
class Gres:
    """How many generic resources of one name and type a node has: ('gpu', 'a100', 4). The type may be None."""

    name: str
    type: str | None
    count: int


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Return the generic resources in the field Gres of a node: two for 'gpu:a100:4(S:0-1),gpu:a100_3g.20gb:2'; () for
    '(null)'."""
    if text in ("", "(null)", "N/A"):
        return ()
    return tuple(_parse_one(_BRACKETS.sub("", item)) for item in _OUTSIDE_BRACKETS.split(text) if item)


def gpu_count(gres: Iterable[Gres], gpu_type: str | None = None) -> int:
    """Return the number of GPUs in a node's generic resources; a MIG slice counts as one GPU.

    Args:
        gpu_type: count only GPUs of this type; None: all.
    """
    return sum(item.count for item in gres if item.name == "gpu" and gpu_type in (None, item.type))


def _parse_one(text: str) -> Gres:
    name, *rest = [part for part in text.split(":") if part != "no_consume"]
    counted = _COUNT.fullmatch(rest[-1]) if rest else None
    if counted:
        rest = rest[:-1]
    count = int(counted[1]) * _FACTOR[counted[2].upper()] if counted else 1
    return Gres(name.removeprefix("gres/"), rest[0] if rest else None, count)


_OPERATOR = re.compile(r"[&,|]")


def has_features(constraint: str, features: Collection[str]) -> bool | None:
    """Return whether a node with these features satisfies the constraint: 'a100&nvlink' needs both features,
    'a100|h100' one.

    None for a constraint that only Slurm can evaluate: on several nodes at once, or with both operators (sbatch(1),
    --constraint).
    """
    operators = {"&" if operator in "&," else "|" for operator in _OPERATOR.findall(constraint)}
    if len(operators) > 1 or any(character in constraint for character in "[]()*"):
        return None
    matches = [name in features for name in _OPERATOR.split(constraint) if name]
    return any(matches) if operators == {"|"} else all(matches)


def constraint_of_groups(groups: Collection[tuple[str, int]]) -> str:
    """Return one constraint for a job on several groups of nodes: [('a100', 2), ('v100&big', 1)] ->
    '[a100*2&(v100&big)*1]' (sbatch(1), --constraint, "Multiple Counts").

    Args:
        groups: (constraint, number of nodes) of each group.
    """
    return "[" + "&".join(f"({names})*{count}" if "&" in names else f"{names}*{count}" for names, count in groups) + "]"


_SUFFIX_FLAGS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWERING_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_ISSUED",
    "^": "REBOOT_REQUESTED",
    "-": "PLANNED",
}
"""Suffix of a node's state -> the flag for which the suffix stands. Older versions of Slurm, and sinfo, print
suffixes."""
_TAKEN = frozenset({"PLANNED", "RESERVED", "COMPLETING", "BLOCKED"})
"""Flags of an idle node that no other job can get now."""
_OUT = frozenset({"DOWN", "ERROR", "FAIL", "FUTURE", "DRAIN", "NOT_RESPONDING", "INVALID_REG", "MAINTENANCE"})
"""States and flags of a node that accepts no jobs."""


@dataclass(frozen=True)
class NodeInfo:
    """One node, as Slurm describes it."""

    name: str
    addr: str
    """Network address or host name (NodeAddr)."""
    states: frozenset[str]
    """Base state and flags, such as {'IDLE', 'DRAIN'}."""
    gres: tuple[Gres, ...]
    """The node's generic resources (GRES)."""
    features: tuple[str, ...] = ()
    """Node features that a constraint can ask for."""
    cpus: int = 0
    """CPUs that jobs can get, without those that the site keeps for the system; 0: unknown."""
    threads_per_core: int = 1
    """CPUs of one core. Slurm gives a job whole cores."""
    memory_mib: int = 0
    """Memory in MiB that jobs can get, without that which the site keeps for the system; 0: unknown."""

    @property
    def accepts_jobs(self) -> bool:
        """Whether jobs can run on the node now or later: it is not down, drained, in maintenance or otherwise out of
        use. True for a powered-down node, because Slurm powers it up."""
        return not self.states & _OUT

    @property
    def is_free(self) -> bool:
        """Whether a job can get the node now."""
        return "IDLE" in self.states and not self.states & (_OUT | _TAKEN)


@dataclass(frozen=True)
class Partition:
    """One partition, as Slurm describes it. Times are in seconds; None means no limit unless the text below a field
    gives it another meaning."""

    name: str
    default: bool
    """Whether jobs that name no partition get this one."""
    state: str
    """UP, DOWN (no job starts), DRAIN (no job is accepted) or INACTIVE."""
    nodes: tuple[str, ...]
    """Names of the partition's nodes."""
    nodes_total: int
    """Number of nodes by Slurm's own count (TotalNodes), else the number of names."""
    max_nodes: int | None
    """Most nodes that one job may have."""
    time_limit_s: int | None
    default_time_s: int | None
    """Time limit of a job that names none; None: the partition's time limit."""
    preempt_mode: str
    """What happens to a preempted job of the partition: OFF (no preemption), REQUEUE, CANCEL or SUSPEND."""
    grace_s: int
    """Grace time: seconds between the notice of a preemption and the job's end."""
    priority_tier: int
    """Jobs of a partition with a higher tier start first, and may preempt jobs of lower tiers."""
    allow_accounts: tuple[str, ...] | None
    """Accounts whose jobs the partition accepts; None: every account."""
    deny_accounts: tuple[str, ...]
    """Accounts whose jobs the partition refuses."""
    allow_qos: tuple[str, ...] | None
    """QOS whose jobs the partition accepts; None: every QOS."""
    deny_qos: tuple[str, ...]
    """QOS whose jobs the partition refuses."""
    needs_reservation: bool = False
    """Whether the partition accepts only jobs with a reservation."""
    whole_nodes: bool = False
    """Whether every job of the partition gets whole nodes (OverSubscribe=EXCLUSIVE)."""
    max_cpus_per_node: int | None = None
    """Most CPUs of a node that all jobs of the partition together may have (MaxCPUsPerNode)."""
    max_memory_per_node_mib: int | None = None
    """Most MiB of a node's memory that one job may have (MaxMemPerNode)."""
    billing_weights: Mapping[str, float] = field(default_factory=dict)
    """Billing units of one CPU, one MiB of memory, one GPU and so on (TRESBillingWeights), by Slurm's name of the
    resource in lower case; {} if the site has set none."""
    gres: tuple[Gres, ...] = ()
    """Every name and type of GRES on the partition's nodes, with the largest count on one node; () if the nodes were
    not described."""


class ClusterConfig(TypedDict):
    """The settings of `scontrol show config` that matter for a run."""

    cluster: str
    """Name of the cluster."""
    version: str
    """Slurm's version, such as 22.05.8."""
    slurmd_timeout_s: int
    """Seconds of silence after which Slurm sets a node down."""
    cred_expire_s: int
    """Seconds that a requeued job waits before it can start (AuthInfo cred_expire; 120 if it is not set)."""
    kill_wait_s: int
    """Seconds between SIGTERM and SIGKILL at the time limit."""
    preempt_type: str
    """PreemptType, such as preempt/partition_prio."""
    preempt_mode: str
    """PreemptMode of the whole cluster, such as REQUEUE."""
    preempt_send_user_signal: bool
    """Whether a preempted job gets the signal of `sbatch --signal`; otherwise it gets SIGTERM only."""
    job_requeue: bool
    """Whether jobs are requeued by default."""
    max_batch_requeue: int
    """Number of failed launches after which Slurm holds a job (5 if it is not set)."""
    min_job_age_s: int
    """Seconds for which the controller remembers an ended job."""
    over_time_limit_s: int | None
    """Seconds by which a job may exceed its time limit; None: without limit."""
    accounting: bool
    """Whether the cluster has accounting, so that sacct can return ended jobs."""
    whole_nodes: bool
    """Whether every job of the cluster gets whole nodes (SelectType=select/linear)."""
    billing_rule: BillingRule
    """How the weighted resources of a job are combined (PriorityFlags)."""
    memory_is_billed: bool
    """Whether Slurm gives memory to jobs, and bills it (SelectTypeParameters with _Memory)."""
    max_array_size: int
    """Most tasks of a job array; 0: the site allows none."""
    topology_plugin: str
    """Slurm's plugin for the closeness of nodes: tree, block or 3d_torus; default or flat: Slurm knows no closeness."""


@dataclass(frozen=True)
class ClusterState:
    """The whole cluster at one moment, as the controller describes it."""

    config: ClusterConfig
    nodes: list[NodeInfo]
    partitions: list[Partition]


def parse_nodes(text: str) -> list[NodeInfo]:
    """Return the nodes in the output of `scontrol show node -o`.

    Raises:
        CommandError: a line lacks a field that every version prints.
    """
    return [_node(record) for record in records(text, "NodeName")]


def _node(record: dict[str, str]) -> NodeInfo:
    name = required(record, "NodeName")
    return NodeInfo(
        name=name,
        addr=record.get("NodeAddr", name),
        states=node_states(required(record, "State")),
        gres=parse_gres(record.get("Gres", "")),
        # A job may ask for all available features; some become active only after a reboot.
        features=_names(record.get("AvailableFeatures", "")),
        # CPUTot counts the CPUs that the site keeps for the system too.
        cpus=number(record.get("CPUEfctv", "")) or number(record.get("CPUTot", "")) or 0,
        threads_per_core=number(record.get("ThreadsPerCore", "")) or 1,
        memory_mib=_job_memory_mib(record),
    )


def _job_memory_mib(record: dict[str, str]) -> int:
    """Return the MiB of a node's memory that jobs can get; 0 if the site states no memory, for which Slurm has 1
    MiB."""
    memory = number(record.get("RealMemory", "")) or 0
    return 0 if memory <= 1 else max(0, memory - (number(record.get("MemSpecLimit", "")) or 0))


def node_states(text: str) -> frozenset[str]:
    """Return base state and flags in a node's state: 'IDLE*+DRAIN' -> {'IDLE', 'NOT_RESPONDING', 'DRAIN'}."""
    states = set()
    for word in text.split("+"):
        while word and word[-1] in _SUFFIX_FLAGS:
            states.add(_SUFFIX_FLAGS[word[-1]])
            word = word[:-1]
        states.add(word)
    return frozenset(states - {""})


def parse_partitions(text: str, nodes: Sequence[NodeInfo] = ()) -> list[Partition]:
    """Return the partitions in the output of `scontrol show partition -o`.

    Args:
        nodes: the cluster's nodes, from which the GRES of each partition are known.

    Raises:
        CommandError: a line lacks a field that every version prints, or its list of nodes cannot be read.
    """
    by_name = {node.name: node for node in nodes}
    return [_partition(record, by_name) for record in records(text, "PartitionName")]


def _partition(record: dict[str, str], by_name: dict[str, NodeInfo]) -> Partition:
    names = node_names(record.get("Nodes", ""))
    return Partition(
        name=required(record, "PartitionName"),
        default=record.get("Default") == "YES",
        state=required(record, "State"),
        nodes=names,
        nodes_total=number(record.get("TotalNodes", "")) or len(names),
        max_nodes=number(required(record, "MaxNodes")),
        time_limit_s=read_duration(required(record, "MaxTime")),
        default_time_s=read_duration(record.get("DefaultTime", "NONE")),
        preempt_mode=record.get("PreemptMode", "OFF"),
        grace_s=number(record.get("GraceTime", "")) or 0,
        priority_tier=number(record.get("PriorityTier", "")) or 1,
        allow_accounts=_allowed(record.get("AllowAccounts", "ALL")),
        deny_accounts=_names(record.get("DenyAccounts", "")),
        allow_qos=_allowed(record.get("AllowQos", "ALL")),
        deny_qos=_names(record.get("DenyQos", "")),
        needs_reservation=record.get("ReqResv") == "YES",
        whole_nodes=record.get("OverSubscribe") == "EXCLUSIVE",
        max_cpus_per_node=number(record.get("MaxCPUsPerNode", "")),
        max_memory_per_node_mib=number(record.get("MaxMemPerNode", "")),
        billing_weights=parse_billing_weights(record.get("TRESBillingWeights", "")),
        gres=_largest(by_name[name].gres for name in names if name in by_name),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text_or_none(text) else ()


def _allowed(text: str) -> tuple[str, ...] | None:
    return None if text == "ALL" else _names(text)


def _largest(all_gres: Iterable[tuple[Gres, ...]]) -> tuple[Gres, ...]:
    largest: dict[tuple[str, str | None], Gres] = {}
    for gres in all_gres:
        for item in gres:
            known = largest.get((item.name, item.type))
            if known is None or known.count < item.count:
                largest[item.name, item.type] = item
    return tuple(largest.values())


def parse_config(text: str) -> ClusterConfig:
    """Return the settings in the output of `scontrol show config`.

    Raises:
        CommandError: a setting that every version prints is missing.
    """
    values = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            values[key.strip()] = value.strip()
    # The option for user signals is in SlurmctldParameters in 22.05, in PreemptParameters in 24.11.
    signals = f"{values.get('SlurmctldParameters', '')},{values.get('PreemptParameters', '')}"
    return ClusterConfig(
        cluster=required(values, "ClusterName"),
        version=required(values, "SLURM_VERSION"),
        slurmd_timeout_s=_first_number(required(values, "SlurmdTimeout")),
        cred_expire_s=_option(values.get("AuthInfo", ""), "cred_expire", 120),
        kill_wait_s=_first_number(required(values, "KillWait")),
        preempt_type=required(values, "PreemptType"),
        preempt_mode=required(values, "PreemptMode"),
        preempt_send_user_signal="send_user_signal" in signals,
        job_requeue=required(values, "JobRequeue") == "1",
        max_batch_requeue=_first_number(values.get("MaxBatchRequeue", "5")),
        min_job_age_s=_first_number(required(values, "MinJobAge")),
        over_time_limit_s=_over_time_limit(required(values, "OverTimeLimit")),
        accounting=values.get("AccountingStorageType", "") not in ("", "(null)", "accounting_storage/none"),
        whole_nodes=values.get("SelectType") == "select/linear",
        memory_is_billed="MEMORY" in values.get("SelectTypeParameters", "").upper(),
        billing_rule=billing_rule(values.get("PriorityFlags", "")),
        max_array_size=_first_number(required(values, "MaxArraySize")),
        # 22.05 says 'none' for what later versions call 'default' and 'flat'.
        topology_plugin=values.get("TopologyPlugin", "").removeprefix("topology/") or "default",
    )


def _over_time_limit(text: str) -> int | None:
    return None if text.startswith("UNLIMITED") else 60 * _first_number(text)


def _first_number(text: str) -> int:
    """Return the number at the start of a setting's value: '10 sec' -> 10; 0 if there is none."""
    digits = re.match(r"\d+", text, re.ASCII)
    return (digits and parse_unsigned(digits[0])) or 0


def _option(text: str, name: str, default: int) -> int:
    setting = re.search(rf"(?:^|,){name}=(\d+)", text, re.ASCII)
    value = parse_unsigned(setting[1]) if setting else None
    return default if value is None else value
