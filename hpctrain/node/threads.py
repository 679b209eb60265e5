"""How many threads the workers of a node compute with."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.records.topology.topology import Topology

THREADS = "OMP_NUM_THREADS"


def thread_environment(topology: Topology, node: str, cores: int, env: Mapping[str, str]) -> dict[str, str]:
    """The variable that gives each worker of the node an even share of the cores; empty where it has them to itself,
    as torch takes all of them then, and where somebody has set the variable.

    Args:
        cores: cores that this process may use.
        env: what the workers start with.
    """
    workers = sum(len(entry.devices) for entry in topology.nodes if entry.id == node)
    return {} if workers < 2 or env.get(THREADS) else {THREADS: str(max(1, cores // workers))}
