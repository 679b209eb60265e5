"""Reads the switches in an earlier topology file (the prior), and checks whether they still hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpctrain.probe.measure.clusters import SwitchTree
from hpctrain.probe.measure.pair_sampling import SwitchGroups
from hpctrain.records.topology.topology import Topology

PriorSwitches = Mapping[str, Sequence[str]]
"""Node -> the switches above it, the highest first."""


def switches_of(topology: Topology) -> PriorSwitches:
    """Return the switches of an earlier probe, or of another tool's file (`hpctrain topology import`)."""
    above: dict[str, list[str]] = {}
    for cluster in sorted(topology.fabric.clusters, key=lambda cluster: -cluster.level):
        for member in cluster.members:
            above.setdefault(member, []).append(cluster.id)
    return above


def contradicts(declared: SwitchTree, groups: SwitchGroups) -> bool:
    """Whether latencies show that a node is not on its declared switch: most of its measured pairs there are far.

    False when latencies have no gap between near and far. Two declared switches that look like one do not count: the
    declaration may be finer than latencies show.
    """
    if groups.near_below is None or not declared.levels:
        return False
    labels = declared.levels[0]
    measured = np.isfinite(groups.latency) & groups.alive[:, None] & groups.alive[None, :]
    inside = measured & (labels[:, None] == labels[None, :]) & (labels >= 0)[:, None]
    np.fill_diagonal(inside, False)
    far = inside & (groups.latency >= groups.near_below)
    elsewhere = 2 * far.sum(axis=1) > inside.sum(axis=1)
    return bool(elsewhere.any())
