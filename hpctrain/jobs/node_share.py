"""Decides whether a run's job takes whole nodes or a part of each (`cluster.exclusive`). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.base.errors import InputError
from hpctrain.base.units import format_bytes
from hpctrain.jobs.partition_checks import candidate_partitions, node_groups, nodes_of_job
from hpctrain.records.run.run import Run
from hpctrain.slurm.cluster import ClusterState, NodeInfo, gpu_count, parse_gres
from hpctrain.slurm.limits import members
from hpctrain.slurm.options import parse_sbatch_options
from hpctrain.slurm.values import parse_unsigned

CPU_OPTIONS = ("cpus-per-task", "cpus-per-gpu", "tres-per-task")
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")


@dataclass(frozen=True)
class NodeShare:
    """The CPUs and the memory of a node that belong to a part of it. A field is None if Slurm does not state it for
    every node that the job may get."""

    cpus: int | None
    memory_mib: int | None


def with_node_share(run: Run, state: ClusterState, given: int | None) -> tuple[Run, list[str]]:
    """Return the run with true or false for `cluster.exclusive`, and a line that says which, why, and for whole nodes
    which GPUs stay idle.

    If it is false, `cluster.sbatch` of the returned run also asks for the CPUs and the memory of the part, unless the
    run file asks for others there. One task runs on each node, so its CPUs are those of the part.

    Args:
        run: the run with the number of GPUs that its job requests.
        given: the number of GPUs per node in the run file; None if it has none.

    Raises:
        InputError: `cluster.exclusive` is false, and nothing says which part of the nodes the job takes.
    """
    cluster, nodes = run.cluster, eligible_nodes(run, state)
    gpus, most = gpus_of_job(run), max((gpu_count(node.gres) for node in nodes), default=0)
    only_whole = _why_only_whole(run, state)
    if cluster.exclusive == "auto":
        part = only_whole is None and given is not None and gpus is not None and gpus < most
    else:
        part = only_whole is None and cluster.exclusive is False
    if not part:
        return _with_exclusive(run, True), [_whole_words(run, gpus, most, only_whole)]
    options = parse_sbatch_options(cluster.sbatch)
    share = node_share(nodes, gpus, parse_unsigned(options.get("cpus-per-task", "")))
    more = []
    if not any(name in options for name in CPU_OPTIONS):
        if not gpus:
            raise InputError(
                "cluster.exclusive: found false, and the job asks for no GPUs; name the CPUs of its part of a node, "
                "cluster.sbatch: [--cpus-per-task=8], or take whole nodes"
            )
        more += [f"--cpus-per-task={share.cpus}"] if share.cpus else []
    if not any(name in options for name in MEMORY_OPTIONS):
        more += [f"--mem={share.memory_mib}M"] if share.memory_mib else []
    asked = _with_exclusive(run, False, [*cluster.sbatch, *more])
    return asked, [_part_words(run, gpus, most, [*cluster.sbatch, *more])]


def node_share(nodes: Sequence[NodeInfo], gpus: int | None, cpus: int | None) -> NodeShare:
    """Return the CPUs and the memory that belong to `gpus` GPUs, or without GPUs to `cpus` CPUs, on each of the nodes:
    the same share of a node as theirs of its GPUs or CPUs. Of unlike nodes, the least counts.

    The CPUs are whole cores, at least one. Jobs that fill a node with equal parts all fit.

    Args:
        nodes: nodes that the job may get.
        gpus: GPUs of the job on each node; None or 0 without GPUs.
        cpus: CPUs of the job on each node, if they are known.
    """
    shares, memories = [], []
    for node in nodes:
        of_node = gpu_count(node.gres) if gpus else node.cpus
        part = gpus or cpus or 0
        if not 0 < part <= of_node:
            continue
        core = node.threads_per_core
        shares.append(max(core, node.cpus * part // of_node // core * core) if node.cpus else 0)
        memories.append(node.memory_mib * part // of_node)
    return NodeShare(min(shares, default=0) or None, min(memories, default=0) or None)


def eligible_nodes(run: Run, state: ClusterState) -> list[NodeInfo]:
    """Return the nodes that the job may get: those of its partitions with the constraints and enough GPUs."""
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
    return [node for name, node in nodes.items() if names is None or name in names]


def gpus_of_job(run: Run) -> int | None:
    """Return the number of GPUs that the job requests on each node: 0 for none, None if it cannot be told, as for
    sbatch's --gpus, which counts those of all nodes."""
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


def _whole_words(run: Run, gpus: int | None, most: int, only_whole: str | None) -> str:
    """Return the line for a job that takes whole nodes; if some of their GPUs stay idle, with the price.

    Args:
        gpus: GPUs that the job requests on each node; None: unknown.
        most: most GPUs of a node that the job may get.
        only_whole: why the job cannot get a part of its nodes; None if it can.
    """
    asked = "as cluster.exclusive asks" if run.cluster.exclusive is True else "the default of cluster.exclusive"
    why = only_whole or asked
    if gpus is None or gpus >= most:
        return f"whole nodes ({why})"
    uses = f"{gpus} of each" if gpus else "none of them"
    instead = f"asks for {gpus}" if gpus else "with cluster.sbatch [--cpus-per-task=N] asks for a part without GPUs"
    remedy = "" if only_whole else f"; `cluster.exclusive: false` {instead}"
    return f"whole nodes ({why}): {run.cluster.nodes} × {most} GPUs are billed, the run uses {uses}{remedy}"


def _part_words(run: Run, gpus: int | None, most: int, sbatch: Sequence[str]) -> str:
    """Return the line for a job that takes a part of each node.

    Args:
        sbatch: the options with which the job asks for CPUs and memory.
    """
    options = parse_sbatch_options(sbatch)
    cpus, memory = options.get("cpus-per-task"), options.get("mem", "")
    parts = [f"{gpus} of {most} GPUs"] if gpus else []
    parts += [f"{cpus} CPU{'' if cpus == '1' else 's'}"] if cpus else []
    mib = parse_unsigned(memory.removesuffix("M"))
    parts += [format_bytes(mib * 2**20) + " of memory" if mib else f"--mem={memory}"] if memory else []
    why = "as cluster.exclusive asks" if run.cluster.exclusive is False else "fewer GPUs are asked for than it has"
    rest = "; other jobs may run on the rest, and cluster.exclusive: true keeps them away"
    return f"a part of each node ({why}): {', '.join(parts) or 'what cluster.sbatch asks for'}{rest}"
