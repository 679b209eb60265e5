"""A word on stderr when a topology that a person gives may no longer be true."""

from __future__ import annotations

import os
from collections.abc import Collection

import click

from hpctrain.base.clock import SystemClock
from hpctrain.launch.preflight.gpu_driver import local_driver_version
from hpctrain.launch.preflight.staleness import MAX_AGE_DAYS, staleness
from hpctrain.records.format.node_set import expand_node_set
from hpctrain.records.topology.topology import Topology


def warn_if_stale(
    topology: Topology | None, nodes: Collection[str] | None = None, max_age_days: float = MAX_AGE_DAYS
) -> None:
    """Say what speaks against the topology, a line each; nothing where none was given.

    Args:
        nodes: nodes that the run gets; None: those of the allocation that this is in, if it is in one.
    """
    if topology is None:
        return
    drivers = local_driver_version(os.environ.get("SLURMD_NODENAME"))
    names = _allocated() if nodes is None else nodes
    for words in staleness(topology, names, drivers, SystemClock().wall(), max_age_days):
        click.echo(f"warning: {words}", err=True)


def _allocated() -> list[str] | None:
    try:
        return expand_node_set(os.environ.get("SLURM_JOB_NODELIST", "")) or None
    except ValueError:
        return None
