"""Says why a topology that a person gave may be out of date: by its age, and by comparison with this process's machine
and Slurm allocation."""

from __future__ import annotations

import os
from collections.abc import Collection

from hpctrain.jobs.partition_checks import nodes_of_allocation
from hpctrain.launch.preflight.checks import MAX_AGE_DAYS, local_driver_version, staleness
from hpctrain.records.topology.topology import Topology


def stale_topology_text(
    topology: Topology | None, nodes: Collection[str] | None, now: float, max_age_days: float = MAX_AGE_DAYS
) -> list[str]:
    """Return each reason why a plan made from the topology may be wrong now, such as other nodes, other drivers, or age
    (`staleness`), as lines; [] for a topology of None.

    Args:
        nodes: nodes that the run gets; None: the nodes of this process's allocation. A process outside an allocation
            does not compare nodes.
        now: seconds since 1970.
        max_age_days: a topology older than this is stale.

    Raises:
        FileError: provenance.created of the topology is no time.
    """
    if topology is None:
        return []
    drivers = local_driver_version(os.environ.get("SLURMD_NODENAME"))
    names = (nodes_of_allocation(os.environ) or None) if nodes is None else nodes
    return staleness(topology, names, drivers, now, max_age_days)
