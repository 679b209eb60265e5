"""What an earlier file says of the switches, pure: where a sampled probe may begin, and whether it still holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpctrain.probe.measure.clusters import SwitchTree
from hpctrain.probe.measure.pair_sampling import SwitchGroups
from hpctrain.records.topology.topology import Topology

PriorSwitches = Mapping[str, Sequence[str]]
"""Node -> the switches above it, the highest first."""


def switches_of(topology: Topology) -> PriorSwitches:
    """The switches of an earlier probe, or of another tool's file (`hpctrain topology import`)."""
    above: dict[str, list[str]] = {}
    for cluster in sorted(topology.fabric.clusters, key=lambda cluster: -cluster.level):
        for member in cluster.members:
            above.setdefault(member, []).append(cluster.id)
    return above


def contradicts(declared: SwitchTree, groups: SwitchGroups) -> bool:
    """Whether latencies show that a node is not on the switch that was told: most of its measured pairs on it are far.

    Where latencies do not tell near from far, nothing contradicts. Two told switches that are one in truth do not
    either: what is told of them holds, and is finer than a latency sees.
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
