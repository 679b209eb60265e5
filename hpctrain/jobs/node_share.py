"""Decides whether a run's job takes whole nodes or a part of each (`cluster.exclusive`). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.base.errors import InputError
from hpctrain.base.units import format_bytes
from hpctrain.jobs.partition_checks import candidate_partitions, node_groups, nodes_of_job
from hpctrain.records.run.run import Run
from hpctrain.slurm.cluster import ClusterState, NodeInfo, Partition, gpu_count, parse_gres
from hpctrain.slurm.limits import members
from hpctrain.slurm.options import parse_sbatch_options
from hpctrain.slurm.values import parse_unsigned

CPU_OPTIONS = ("cpus-per-task", "cpus-per-gpu", "tres-per-task")
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")


@dataclass(frozen=True)
class NodeShare:
    """The CPUs and the memory of a node that belong to a part of it. A field is None if Slurm does not state it."""

    cpus: int | None
    memory_mib: int | None
    limits: frozenset[str] = frozenset()
    """Names of the partitions' limits without which the share would have more CPUs or memory: MaxCPUsPerNode,
    MaxMemPerNode."""


def with_node_share(run: Run, state: ClusterState, given: int | None) -> tuple[Run, list[str]]:
    """Return the run with true or false for `cluster.exclusive`, and a line that says whether the job gets whole nodes
    or a part of each, why, and for whole nodes which GPUs stay idle.

    If the job gets parts, `cluster.sbatch` of the returned run also asks for the CPUs and the memory of a part, unless
    the run file itself asks for CPUs or memory there. One task runs on each node, so a task has the CPUs of the part.

    Args:
        run: the run with the number of GPUs that its job requests.
        given: the number of GPUs per node in the run file; None if it has none.

    Raises:
        InputError: `cluster.exclusive` is false, and nothing says which part of the nodes the job takes.
    """
    cluster, nodes = run.cluster, eligible_nodes(run, state)
    gpus, counts = gpus_of_job(run), [gpu_count(node.gres) for node in nodes] or [0]
    only_whole = _why_only_whole(run, state)
    if cluster.exclusive == "auto":
        part = only_whole is None and given is not None and gpus is not None and gpus < max(counts)
    else:
        part = only_whole is None and cluster.exclusive is False
    if not part:
        return _with_exclusive(run, True), [_whole_words(run, gpus, counts, only_whole)]
    options = parse_sbatch_options(cluster.sbatch)
    partitions = candidate_partitions(cluster.partition, state.partitions)
    cpus = parse_unsigned(options.get("cpus-per-task", ""))
    shares = [share for node in nodes if (share := node_share(node, gpus, cpus, partitions))]
    more, ranges = [], []
    if not any(name in options for name in CPU_OPTIONS):
        if not gpus:
            raise InputError(f"cluster.exclusive: found false, and {_why_no_cpus(gpus)}, or take whole nodes")
        known = [share.cpus for share in shares if share.cpus]
        more += [f"--cpus-per-task={min(known)}"] if known else []
        ranges += [f"{min(known)} to {max(known)} CPUs"] if len(set(known)) > 1 else []
    if not any(name in options for name in MEMORY_OPTIONS):
        known = [share.memory_mib for share in shares if share.memory_mib]
        more += [f"--mem={min(known)}M"] if known else []
        sizes = [format_bytes(mib * 2**20) for mib in (min(known), max(known))] if known else []
        ranges += [f"{' to '.join(sizes)} of memory"] if len(set(sizes)) > 1 else []
    asked, lines = [*cluster.sbatch, *more], []
    if ranges:
        lines.append(
            f"the share differs from node to node, {' and '.join(ranges)}, and the least is asked for on every node; "
            "for more, choose among the nodes with -C or cluster.gpu_type, or write --cpus-per-task and --mem into "
            "cluster.sbatch"
        )
    cut = {limit for share in shares for limit in share.limits}
    options_here = {"MaxCPUsPerNode": "--cpus-per-task", "MaxMemPerNode": "--mem"}
    limits = [name for name, option in options_here.items() if name in cut and any(option in item for item in more)]
    if limits:
        lines.append(f"the share was cut to what partition {cluster.partition} allows: {', '.join(limits)}")
    return _with_exclusive(run, False, asked), [_part_words(run, gpus, counts, asked), *lines]


def node_share(
    node: NodeInfo, gpus: int | None, cpus: int | None, partitions: Sequence[Partition] = ()
) -> NodeShare | None:
    """Return the CPUs and the memory of a node that belong to a job with `gpus` of its GPUs, or without GPUs with
    `cpus` of its CPUs. The job's share of the GPUs (or CPUs) is also its share of CPUs and memory. None if the node has
    fewer GPUs (or CPUs).

    The CPUs are whole cores, at least one. Jobs that fill a node with equal parts all fit.

    Args:
        gpus: GPUs of the job on the node; None or 0 without GPUs.
        cpus: CPUs of the job on the node, if they are known.
        partitions: partitions in which the job may start. The CPUs are a share of those that these partitions let
            their jobs use on the node. The memory is at most what these partitions give to one job on the node.
    """
    of_node = gpu_count(node.gres) if gpus else node.cpus
    part = gpus or cpus or 0
    if not 0 < part <= of_node:
        return None
    here = [partition for partition in partitions if node.name in partition.nodes]
    most_cpus = min([item.max_cpus_per_node for item in here if item.max_cpus_per_node], default=node.cpus)
    memory = node.memory_mib * part // of_node
    most_memory = min([item.max_memory_per_node_mib for item in here if item.max_memory_per_node_mib], default=memory)
    cut = {"MaxCPUsPerNode": gpus and most_cpus < node.cpus, "MaxMemPerNode": most_memory < memory}
    core = node.threads_per_core
    share = max(core, min(node.cpus, most_cpus) * part // of_node // core * core) if node.cpus else None
    return NodeShare(share, min(memory, most_memory) or None, frozenset(name for name, was in cut.items() if was))


def _why_no_cpus(gpus: int | None) -> str:
    """Return why the number of CPUs of a part of a node is not known, and which key of the run file gives it."""
    name_cpus = "name the CPUs of its part of a node, cluster.sbatch: [--cpus-per-task=8]"
    if gpus is None:
        return (
            "with --gpus in cluster.sbatch it is not known how many GPUs each node gives; ask for them with -G or "
            f"cluster.devices_per_node, {name_cpus}"
        )
    return f"the job asks for no GPUs; {name_cpus}"


def eligible_nodes(run: Run, state: ClusterState) -> list[NodeInfo]:
    """Return the nodes that the job may get: the nodes of its partitions that meet the run's constraints and have
    enough GPUs. Nodes that accept no jobs are left out, unless no other node is left.
    """
    cluster, names = run.cluster, nodes_of_job(run, state)
    partitions = candidate_partitions(cluster.partition, state.partitions)
    constraints = [constraint for constraint, _ in node_groups(run)]
    nodes = {
        node.name: node
        for partition in partitions
        for constraint in constraints
        for node in members(partition, state.nodes, constraint)
        if gpu_count(node.gres, cluster.gpu_type) >= (gpus_of_job(run) or 0)
    }
    allowed = [node for name, node in nodes.items() if names is None or name in names]
    return [node for node in allowed if node.accepts_jobs] or allowed


def gpus_of_job(run: Run) -> int | None:
    """Return the number of GPUs that the job requests on each node: 0 for none, None if it is not known, as for
    sbatch's --gpus, which counts the GPUs of all nodes.
    """
    cluster, options = run.cluster, parse_sbatch_options(run.cluster.sbatch)
    if cluster.devices_per_node is not None and cluster.device != "cpu":
        return cluster.devices_per_node
    if "gpus" in options:
        return None
    per_task = options.get("gpus-per-task", "")  # one task runs on each node
    return gpu_count(parse_gres(options.get("gres", ""))) or gpu_count(
        parse_gres(f"gpu:{per_task}" if per_task else "")
    )


def _why_only_whole(run: Run, state: ClusterState) -> str | None:
    """Return why the job gets whole nodes whatever it asks for; None if it can get a part."""
    if state.config["whole_nodes"]:
        return "this cluster gives nothing else: SelectType=select/linear"
    partitions = candidate_partitions(run.cluster.partition, state.partitions)
    if partitions and all(partition.whole_nodes for partition in partitions):
        return f"partition {partitions[0].name} gives nothing else: OverSubscribe=EXCLUSIVE"
    return None


def _with_exclusive(run: Run, exclusive: bool, sbatch: list[str] | None = None) -> Run:
    update = {"exclusive": exclusive} | ({} if sbatch is None else {"sbatch": sbatch})
    return run.model_copy(update={"cluster": run.cluster.model_copy(update=update)})


def _whole_words(run: Run, gpus: int | None, counts: Sequence[int], only_whole: str | None) -> str:
    """Return the line for a job that takes whole nodes. If GPUs of these nodes stay idle, the line says how many GPUs
    are billed and how many the run uses.

    Args:
        gpus: GPUs that the job requests on each node; None: unknown.
        counts: GPUs of each node that the job may get.
        only_whole: why the job cannot get a part of its nodes; None if it can.
    """
    asked = "as cluster.exclusive asks" if run.cluster.exclusive is True else "the default of cluster.exclusive"
    why = only_whole or asked
    if gpus is None or gpus >= max(counts):
        return f"whole nodes ({why})"
    uses = f"{gpus} of each" if gpus else "none of them"
    instead = f"asks for {gpus}" if gpus else "with cluster.sbatch [--cpus-per-task=N] asks for a part without GPUs"
    remedy = "" if only_whole else f"; `cluster.exclusive: false` {instead}"
    return f"whole nodes ({why}): {run.cluster.nodes} × {_range(counts)} GPUs are billed, the run uses {uses}{remedy}"


def _range(counts: Sequence[int]) -> str:
    """Return '8', or for unlike counts '4 to 8'."""
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


def _part_words(run: Run, gpus: int | None, counts: Sequence[int], sbatch: Sequence[str]) -> str:
    """Return the line for a job that takes a part of each node.

    Args:
        counts: GPUs of each node that the job may get.
        sbatch: the options with which the job asks for CPUs and memory.
    """
    options = parse_sbatch_options(sbatch)
    cpus, memory = options.get("cpus-per-task"), options.get("mem", "")
    parts = [f"{gpus} of {_range(counts)} GPUs"] if gpus else []
    parts += [f"{cpus} CPU{'' if cpus == '1' else 's'}"] if cpus else []
    mib = parse_unsigned(memory.removesuffix("M"))
    parts += [format_bytes(mib * 2**20) + " of memory" if mib else f"--mem={memory}"] if memory else []
    why = "as cluster.exclusive asks" if run.cluster.exclusive is False else "fewer GPUs are asked for than it has"
    rest = "; other jobs may run on the rest, and cluster.exclusive: true keeps them away"
    return f"a part of each node ({why}): {', '.join(parts) or 'what cluster.sbatch asks for'}{rest}"
