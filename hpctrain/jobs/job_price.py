"""What a job is billed: its nodes and GPUs, and Slurm's billing units. Also the kinds of GPUs that it may get. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.jobs.node_share import MEMORY_OPTIONS, eligible_nodes, gpus_of_job
from hpctrain.jobs.partition_checks import candidate_partitions
from hpctrain.probe.measure.data_sheet import is_gpu_name, peak_flops
from hpctrain.records.run.run import Run
from hpctrain.slurm.billing import billing_units
from hpctrain.slurm.cluster import ClusterState, NodeInfo, gpu_count
from hpctrain.slurm.options import parse_sbatch_options
from hpctrain.slurm.values import parse_memory, parse_unsigned

_MIG = re.compile(r"\d+g\.\d+gb", re.IGNORECASE)


@dataclass(frozen=True)
class JobPrice:
    """What Slurm bills for a job with the fewest nodes that the run asks for, and with which GPUs it computes."""

    nodes: int
    gpus: int
    """Billed GPUs of all nodes: with whole nodes all their GPUs, else those of the job's part."""
    used_gpus: int
    """GPUs of all nodes with which the job computes."""
    peaks: tuple[tuple[str, float], ...]
    """(Slurm's name, peak FLOP/s of 16-bit products by the data sheet) of each kind of GPU that the job may get. ()
    without GPUs, or if a kind has no data sheet."""
    units_per_h: float | None = None
    """Slurm's billing units for the whole job in one hour; None if the partition has no weights, or the units cannot be
    computed.
    """


def job_price(asked: Run, state: ClusterState) -> JobPrice | None:
    """Return the price of a job; None if it is not known how many GPUs it gets.

    Args:
        asked: the run with what its job requests: the number of GPUs, and whole nodes or a part of each.
    """
    nodes, used = eligible_nodes(asked, state), gpus_of_job(asked)
    if used is None or not nodes:
        return None
    count, whole = asked.cluster.node_range[0], asked.cluster.exclusive is not False
    # Of nodes with more and with fewer GPUs, Slurm decides which ones the job gets: the most are counted.
    billed = max(gpu_count(node.gres) for node in nodes) if whole else used
    kinds = [_gpu_kind(node, asked.cluster.gpu_type) for node in nodes] if used else []
    peaks = tuple(dict.fromkeys(kind for kind in kinds if kind is not None)) if None not in kinds else ()
    return JobPrice(count, count * billed, count * used, peaks, _units_per_h(asked, state, nodes, used))


def _gpu_kind(node: NodeInfo, gpu_type: str | None) -> tuple[str, float] | None:
    """Return name and peak FLOP/s of one of a node's GPUs. The name is the GPU's type in the node's generic resources
    (`gpu:a100:4`), or if they give no type, the node's feature that is a GPU's name. FLOP/s are those of the data sheet
    for this name.

    Return None if the node has no such GPU, if its GPUs or these features are of several types, and for a GPU without a
    data sheet and a part of a GPU (MIG).

    Args:
        gpu_type: look only at the node's GPUs of this type, which may have others beside them; None: at all GPUs.
    """
    types = [item.type for item in node.gres if item.name == "gpu" and gpu_type in (None, item.type)]
    typed = [types[0]] if types and types[0] is not None else []
    names = typed or list(node.features)
    if len(types) != 1 or any(_MIG.search(name) for name in names):
        return None
    known = {peak: name for name in reversed(names) if (typed or is_gpu_name(name)) and (peak := peak_flops(name))}
    if len(known) != 1:
        return None
    peak, name = known.popitem()
    return name, peak


def _units_per_h(asked: Run, state: ClusterState, nodes: Sequence[NodeInfo], used: int) -> float | None:
    """Return the billing units of the whole job in one hour; None if they cannot be computed. Of unlike nodes and
    several partitions, the dearest counts.

    Args:
        used: GPUs that the job computes with on each node.
    """
    whole, options = asked.cluster.exclusive is not False, parse_sbatch_options(asked.cluster.sbatch)
    units = []
    for partition in candidate_partitions(asked.cluster.partition, state.partitions):
        if not partition.billing_weights:
            return None
        for node in (node for node in nodes if node.name in partition.nodes):
            cpus = node.cpus if whole else parse_unsigned(options.get("cpus-per-task", ""))
            memory = node.memory_mib if whole else _memory_mib(options, node, cpus or 0, used)
            if not state.config["memory_is_billed"] or "mem" not in partition.billing_weights:
                memory = 0
            if not cpus or memory is None:
                return None
            gpus = gpu_count(node.gres) if whole else used
            types = {f"gres/gpu:{item.type}".lower(): item.count for item in node.gres if item.name == "gpu"}
            types = types if whole else dict.fromkeys(types, used)
            resources = {"cpu": cpus, "mem": memory, "node": 1, "gres/gpu": gpus, **types}
            # A weight of a type of GPU that this node does not have adds nothing.
            absent = dict.fromkeys((name for name in partition.billing_weights if name.startswith("gres/gpu:")), 0)
            of_node = billing_units(absent | resources, partition.billing_weights, state.config["billing_rule"])
            if of_node is None:
                return None
            units.append(of_node * asked.cluster.node_range[0])
    return max(units, default=None)


def _memory_mib(options: Mapping[str, str], node: NodeInfo, cpus: int, gpus: int) -> int | None:
    """Return the memory of a job on a node by its options, in MiB; None if they do not say it, or not clearly.

    Args:
        cpus: CPUs of the job on the node.
        gpus: GPUs of the job on the node.
    """
    given = [name for name in MEMORY_OPTIONS if name in options]
    amount = parse_memory(options[given[0]]) if len(given) == 1 else None
    if amount is None:
        return None
    if given == ["mem"]:
        return amount or node.memory_mib or None  # --mem=0 is all of the node's memory
    return amount * (cpus if given == ["mem-per-cpu"] else gpus) or None
