"""Sets how many threads each worker of a node computes with."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.records.topology.topology import Topology

THREADS = "OMP_NUM_THREADS"


def thread_environment(topology: Topology, node: str, cores: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives each worker of the node an equal share of the cores.

    It is empty for a single worker, as torch then uses all cores, and where the variable is set already.

    Args:
        cores: cores that this process may use.
        env: the workers' environment.
    """
    workers = sum(len(entry.devices) for entry in topology.nodes if entry.id == node)
    return {} if workers < 2 or env.get(THREADS) else {THREADS: str(max(1, cores // workers))}
