"""Chooses what a starter run asks of this cluster, by what Slurm says about it: partition, account, GPU type, nodes,
time limit and precision, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hpctrain.base.errors import CommandError, InputError, RefusedError
from hpctrain.base.units import format_seconds
from hpctrain.jobs.data_sheet_time import REACHED_MFU
from hpctrain.jobs.partition_checks import SIGNAL_EARLY_S, check_time_limit, gpus_per_node_available
from hpctrain.jobs.wall_time import WallTime
from hpctrain.launch.slurm_job.queue import ranked_partitions
from hpctrain.probe.measure.data_sheet import least_memory_bytes, matrix_dtype, peak_flops
from hpctrain.records.format.node_name import NODES_MAX
from hpctrain.records.run.run import Run
from hpctrain.slurm.accounts import UserAccounts
from hpctrain.slurm.cluster import ClusterState, NodeInfo, Partition, gpu_count, has_features
from hpctrain.slurm.commands import NotConfiguredError, Slurm
from hpctrain.slurm.limits import PartitionFit, members
from hpctrain.slurm.values import format_time_limit

UNKNOWN_GPU_FLOPS, CPU_NODE_FLOPS = 5e12, 5e10
"""FLOP/s that the estimate of a time limit counts on for a GPU without a data sheet, and for a node without GPUs:
assumptions. Of a GPU with a data sheet, the estimate counts on the share of the peak that nine of ten published runs
reached.
"""
LEAST_STEP_S = 0.1
"""Least seconds of a step in the estimate of a time limit, however small the model: an assumption."""
START_UP_S = 900.0
"""Seconds that the estimate of a time limit adds for probe, plan and start of the workers: an assumption."""
LONGEST_S = 86400
"""Longest time limit in seconds that a starter run asks for; a longer run continues as a new job."""
STATE_BYTES, STATE_SHARE = 16, 0.7
"""Bytes of weights, gradients and AdamW's two moments in fp32 per parameter, and the share of the GPUs' memory that
they may fill, an assumption: the rest is for activations."""
_VOCABULARY = 32_000
"""Vocabulary of the estimate, because the corpus may not exist yet."""


class Choice(NamedTuple):
    """A value that `hpctrain init` writes into a run file, and the reason for it."""

    value: str | None
    """Value of the key, as text; None: the key is left out."""
    why: str
    """Text of the comment beside the key."""


@dataclass(frozen=True)
class StarterCluster:
    """What a starter run asks of a Slurm cluster."""

    nodes: Choice
    partition: Choice
    account: Choice
    gpu_type: Choice
    time: Choice
    precision: Choice
    warnings: list[str] = field(default_factory=list)
    """What a person should know before submitting, as lines."""

    @property
    def words(self) -> str:
        """The chosen partition, account, GPU type, time, nodes and precision in one line, for a person."""
        named = {"partition": self.partition, "account": self.account, "GPU type": self.gpu_type, "time": self.time}
        chosen = [f"{name} {choice.value}" for name, choice in named.items() if choice.value is not None]
        return ", ".join([*chosen, f"nodes {self.nodes.value}", str(self.precision.value)])


@dataclass(frozen=True)
class SeenCluster:
    """What Slurm said about this cluster and its user when it was asked."""

    state: ClusterState | None
    """Settings, nodes and partitions of the cluster; None if Slurm gave no answer."""
    accounts: UserAccounts | None
    """The user's accounts; None: not known."""
    problem: str = ""
    """Why `state` is None."""


def see_cluster(slurm: Slurm, user: str) -> SeenCluster | None:
    """Return what Slurm says about this cluster and the accounts of `user`; None if this machine belongs to no Slurm
    cluster. If a command of Slurm fails, no error is raised, and `problem` of the result says why."""
    if not slurm.available():
        return None
    try:
        return SeenCluster(slurm.state(), slurm.accounts(user))
    except NotConfiguredError:
        return None
    except CommandError as error:
        return SeenCluster(None, None, str(error))


def choose_cluster(
    run: Run, seen: SeenCluster, defaults: Mapping[str, tuple[Any, str]], given: Mapping[str, str]
) -> StarterCluster:
    """Return what a starter run asks of the cluster as it is now.

    The run gets the partition that `hpctrain submit` would choose, with these exceptions: a partition whose time limit
    is over before a job trains is left out; if too few nodes have GPUs for the run, one node with GPUs is better than
    several without; if the default account may not use a partition with GPUs and another account of the user may, that
    account is better. If Slurm did not answer, or no partition takes the run, everything but the number of nodes and
    the values of `given` is left to `hpctrain submit`, with a warning.

    Args:
        run: the starter run; its number of nodes is the most that is asked for.
        defaults: key of `cluster` -> (value, source), for the keys that every run of this user gets on this cluster,
            such as from site.yaml. The run file leaves them out.
        given: values of `partition` and `account` that the user chose; they come before `defaults`.

    Raises:
        InputError: the cluster has no such partition.
        RefusedError: the partition that the user chose does not take the run.
    """
    state, accounts = seen.state, seen.accounts
    if state is None:
        return _without_choice(run, seen.problem, given)
    wanted = {**{key: value for key, (value, _) in defaults.items()}, **given}
    if "partition" in wanted:
        state = replace(state, partitions=_named(wanted["partition"], state.partitions))
    else:
        least_s = run.cluster.save_notice_s + SIGNAL_EARLY_S
        trains = [item for item in state.partitions if item.time_limit_s is None or item.time_limit_s > least_s]
        state = replace(state, partitions=trains)
    if "constraint" in wanted:
        there = [node for node in state.nodes if has_features(wanted["constraint"], node.features) is not False]
        state = replace(state, nodes=there)
    usable = [wanted["account"]] if "account" in wanted else (accounts.names if accounts else ()) or [None]
    try:
        asked, fits = _best(run, state, usable, {key: wanted.get(key) for key in ("qos", "gpu_type", "constraint")})
    except RefusedError as error:
        if "partition" in given:
            raise
        return _without_choice(run, str(error).replace("\n", " "), given)
    fit = fits[0]
    gpu_type, gpu_why, gpus_per_node = _gpu_type(fit, state, asked)
    name, precision = _precision(fit, state, gpu_type)
    least = _least_nodes(asked, name, gpus_per_node)
    most = min(len(_gpu_nodes(fit.partition, state, gpu_type)), fit.partition.max_nodes or NODES_MAX)
    nodes = _nodes(asked, run, fit)
    warnings = []
    if least > asked.cluster.node_range[0]:
        nodes = Choice(str(min(least, most)), f"for the weights, gradients and optimizer in the memory of {name}")
        asked = asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"nodes": nodes.value})})
        if least > most:
            words = (
                f"needs about {least} nodes with {gpus_per_node} {name}, and the partition gives a job {most} of them"
            )
            warnings = [f"model.preset: {run.model.preset} {words}; choose a smaller one"]
    time = _time(asked, fit.partition, name, gpus_per_node * asked.cluster.node_range[0])
    partition = Choice(fit.partition.name, _partition_why(fits, state))
    account = _account(asked.cluster.account, given.get("account"), accounts, fit.partition)

    def unless_default(key: str, choice: Choice) -> Choice:
        default = None if key in given else defaults.get(key)
        return Choice(None, f"{default[0]}, from {default[1]}") if default else choice

    return StarterCluster(
        nodes=nodes,
        partition=unless_default("partition", partition),
        account=unless_default("account", account),
        gpu_type=unless_default("gpu_type", Choice(gpu_type, gpu_why)),
        time=time,
        precision=precision,
        warnings=[*warnings, *_time_warnings(asked, fit.partition, time)],
    )


def _named(names: str, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions with these names, which commas separate.

    Raises:
        InputError: there is no partition of one of the names.
    """
    by_name = {partition.name: partition for partition in partitions}
    for name in names.split(","):
        if name not in by_name:
            raise InputError(f"cluster.partition: found '{name}'; allowed on this cluster: {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]


def _without_choice(run: Run, problem: str, given: Mapping[str, str]) -> StarterCluster:
    """Return the choices for a cluster on which nothing can be chosen: the nodes of `run` and what the user chose,
    everything else left to `hpctrain submit`.

    Args:
        problem: why nothing can be chosen.
        given: values of `partition` and `account` that the user chose.
    """
    open_choices = {
        "partition": Choice(None, "default: hpctrain submit chooses the one that fits best"),
        "account": Choice(None, "default: your default account"),
    }
    chosen = {key: Choice(given[key], "as you chose") if key in given else open_choices[key] for key in open_choices}
    return StarterCluster(
        nodes=Choice(run.cluster.nodes, "a number, or a range that the run can use: 3-4"),
        partition=chosen["partition"],
        account=chosen["account"],
        gpu_type=Choice(None, "GPUs of this type only"),
        time=Choice(None, "default: the partition's"),
        precision=Choice("fp32", "the GPUs are not known; bf16 on NVIDIA Ampere, AMD MI200 and later; fp16 on Volta"),
        warnings=[
            f"partition, account, GPU type and time are not chosen ({problem}); hpctrain submit chooses the partition"
        ],
    )


def _time_warnings(asked: Run, partition: Partition, time: Choice) -> list[str]:
    limited = asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"time": time.value})})
    try:
        check_time_limit(limited, [partition])
    except InputError as error:
        return [str(error)]
    return []


def _best(
    run: Run, state: ClusterState, accounts: Sequence[str | None], fixed: Mapping[str, str | None]
) -> tuple[Run, list[PartitionFit]]:
    """Return the run with number of nodes and account, and the partitions that take it, the best first (see
    `choose_partition`). The run has the most nodes that its file allows, or one node if no partition takes those or
    only a job on one node gets GPUs.

    Args:
        accounts: accounts to choose from, the preferred one first; an account None is Slurm's default.
        fixed: values of other keys of `cluster`.

    Raises:
        RefusedError: no partition takes it.
    """
    most = run.cluster.node_range[1]
    fitting, refused = [], RefusedError("")
    for nodes in dict.fromkeys((most, 1)):
        for account in accounts:
            cluster = {"kind": "slurm", "partition": None, "nodes": str(nodes), "account": account, **fixed}
            asked = run.model_copy(update={"cluster": run.cluster.model_copy(update=cluster)})
            try:
                fitting.append((asked, ranked_partitions(asked, state)))
            except RefusedError as error:
                refused = error
    if not fitting:
        raise refused
    # The first of the best: as many nodes as asked for, and the default account, come first.
    return max(fitting, key=lambda item: item[1][0].has_gpus)


def _gpu_nodes(partition: Partition, state: ClusterState, gpu_type: str | None = None) -> list[NodeInfo]:
    return [node for node in members(partition, state.nodes) if gpu_count(node.gres, gpu_type)]


def _nodes(asked: Run, run: Run, fit: PartitionFit) -> Choice:
    count = asked.cluster.nodes
    if count != run.cluster.nodes:
        return Choice(count, f"partition {fit.partition.name} gives a job no more nodes{' with GPUs' * fit.has_gpus}")
    return Choice(count, "the fewest that use a network; a number, or a range that the run can use: 3-4")


def _least_nodes(asked: Run, gpu: str | None, gpus_per_node: int) -> int:
    """Return the smallest number of nodes whose GPUs together hold the model's weights, gradients and moments, by a
    rough estimate; 1 if the GPUs' memory is not known.

    Args:
        gpu: name of the GPUs; None: not known.
    """
    memory = least_memory_bytes(gpu) if gpu else None
    if memory is None or not gpus_per_node:
        return 1
    spec = asked.spec().model_copy(update={"vocab": _VOCABULARY})
    return math.ceil(spec.parameters() * STATE_BYTES / (STATE_SHARE * memory * gpus_per_node))


def _partition_why(fits: Sequence[PartitionFit], state: ClusterState) -> str:
    fit, others = fits[0], fits[1:]
    nodes = _gpu_nodes(fit.partition, state) if fit.has_gpus else members(fit.partition, state.nodes)
    free = sum(node.is_free for node in nodes)
    fate = "may be preempted" if fit.preemptible else "are not preempted"
    limit = format_time_limit(fit.partition.time_limit_s)
    words = f"{free} of its {len(nodes)} nodes {'with' if fit.has_gpus else 'without'} GPUs are free"
    words += f", jobs {fate}, time limit {limit}"
    return f"{words}; next best: {others[0].partition.name}" if others else words


def _account(used: str | None, chosen: str | None, accounts: UserAccounts | None, partition: Partition) -> Choice:
    """Return the account of the job with its reason.

    Args:
        used: the account that the partitions were ranked for; None: the user has none that is known.
        chosen: the account that the user chose; None: the user chose none.
    """
    if used is None:
        return Choice(None, "Slurm's accounting names none of yours" if accounts else "this Slurm lists no accounts")
    others = ", ".join(name for name in accounts.names if name != used) if accounts else ""
    if used == chosen or accounts is None:
        why = "as you chose"
    elif not others:
        why = "your only account"
    elif used == accounts.default:
        why = "your default account"
    elif accounts.default is None:
        why = "the first of your accounts"
    else:
        why = f"of your accounts one that may use partition {partition.name}"
    return Choice(used, f"{why}; you also have {others}" if others else why)


def _gpu_type(fit: PartitionFit, state: ClusterState, asked: Run) -> tuple[str | None, str, int]:
    """Return (GPU type to request in the partition of `fit`, the reason, GPUs to request on each node).

    Types with enough free nodes come before the others; among them, the type with the most FLOP/s in its data sheet
    is chosen. If no type is on enough nodes, the type is None, and the GPUs are those of any type. If the partition has
    no GPUs, the type is None, and the number of GPUs is 0.
    """
    if not fit.has_gpus:
        return None, "the partition has no GPUs", 0
    partition, count = fit.partition, asked.cluster.node_range[0]
    named = {item.type for item in partition.gres if item.name == "gpu" and item.type is not None}
    types = sorted(named & {asked.cluster.gpu_type} if asked.cluster.gpu_type else named)

    def free(kind: str | None) -> int:
        return sum(node.is_free for node in _gpu_nodes(partition, state, kind))

    def rank(kind: str) -> tuple[bool, float, int]:
        return free(kind) < count, -(peak_flops(kind) or 0.0), -free(kind)

    enough = [kind for kind in types if len(_gpu_nodes(partition, state, kind)) >= count]
    best = min(enough, key=rank, default=None)
    each = gpus_per_node_available([partition], state.nodes, count, best)
    if best is None:
        reason = "no type has enough nodes" if types else "Slurm names no types of GPU in the partition"
        return None, reason, each
    others = ", ".join(kind for kind in types if kind != best)
    nodes = _gpu_nodes(partition, state, best)
    words = f"{each} on a node; {free(best)} of {len(nodes)} nodes with it are free"
    return best, f"{words}; also there: {others}" if others else words, each


def _precision(fit: PartitionFit, state: ClusterState, gpu_type: str | None) -> tuple[str | None, Choice]:
    """Return the name by which the GPUs are known (their type, else a feature of all GPU nodes, else the partition's
    name; None: not known), and the choice of the precision.
    """
    if not fit.has_gpus:
        return None, Choice("fp32", "there are no GPUs, and few CPUs are faster in bf16; or bf16, fp16")
    features = [set(node.features) for node in _gpu_nodes(fit.partition, state, gpu_type)]
    names = [gpu_type or "", *sorted(set.intersection(*features)), fit.partition.name]
    name = next((name for name in names if matrix_dtype(name)), None)
    dtype = matrix_dtype(name) if name else None
    if name is None or dtype is None:
        what = f"GPU type {gpu_type}" if gpu_type else "the type of the GPUs"
        return None, Choice("fp32", f"{what} is not known; bf16 on NVIDIA Ampere, AMD MI200 and later; fp16 on Volta")
    why = {
        "bf16": f"{name} has fast bf16 matrix products; weights, sums and optimizer stay in fp32; or fp32, fp16",
        "fp16": f"{name} has fast matrix products in fp16 and not in bf16; weights and sums stay in fp32; or fp32",
        "fp32": f"{name} has no fast matrix products in bf16 or fp16",
    }
    return name, Choice(dtype, why[dtype])


def _time(asked: Run, partition: Partition, gpu: str | None, gpus: int) -> Choice:
    """Return a time limit by a rough estimate of the run's duration, no longer than the partition's.

    Args:
        gpu: name of the GPUs; None: not known.
        gpus: number of GPUs of the job; 0: it trains on CPUs.
    """
    spec = asked.spec().model_copy(update={"vocab": _VOCABULARY})
    flops = 3.0 * spec.forward_flops(asked.batch.global_, asked.data.seq_len)
    peak = peak_flops(gpu) if gpu else None
    speed = (
        gpus * (peak * REACHED_MFU[0] if peak else UNKNOWN_GPU_FLOPS) or asked.cluster.node_range[0] * CPU_NODE_FLOPS
    )
    time = WallTime(max(LEAST_STEP_S, flops / speed), asked.steps, START_UP_S)
    wanted = time.suggested_s(asked.cluster.save_notice_s)
    steps_s = format_seconds(time.step_s * time.steps)
    unknown = f"{UNKNOWN_GPU_FLOPS / 1e12:g} TFLOP/s a GPU" if gpus else f"{CPU_NODE_FLOPS / 1e9:g} GFLOP/s a node"
    basis = f"{REACHED_MFU[0]:.0%} of the peak of {gpus} {gpu}" if peak else unknown
    why = f"a guess: {steps_s} of steps at {basis}, {START_UP_S / 60:g} min to start, a margin"
    most = min(partition.time_limit_s or LONGEST_S, LONGEST_S)
    if wanted <= most:
        return Choice(format_time_limit(wanted), why)
    limit = "the partition's limit" if most == partition.time_limit_s else "a day"
    return Choice(format_time_limit(most), f"{limit}, then it continues as a new job; {why}")
