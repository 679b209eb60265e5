"""How many threads a worker has, as a variable of its environment."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.base.system.job_share import usable_cpus
from hpctrain.records.topology.topology import Topology

THREADS = "OMP_NUM_THREADS"
"""Environment variable with the number of threads of a worker."""


def share_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return {OMP_NUM_THREADS: number} that keeps a process to the CPUs which Slurm gave its job; {} if the kernel does
    so already, or if `env` has the variable."""
    cpus = usable_cpus(env)
    return {} if env.get(THREADS) or cpus >= usable_cpus({}) else {THREADS: str(cpus)}


def thread_environment(topology: Topology, node: str, cores: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return {OMP_NUM_THREADS: number} that gives each worker of the node an equal share of the cores; {} if the node
    has a single worker, because torch then uses all cores, or if `env` has the variable already.

    Args:
        node: name of the node.
        cores: number of cores that this process may use.
        env: the workers' environment.
    """
    workers = sum(len(entry.devices) for entry in topology.nodes if entry.id == node)
    return {} if workers < 2 or env.get(THREADS) else {THREADS: str(max(1, cores // workers))}
