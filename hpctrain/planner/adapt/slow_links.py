"""Finds links that became slower or faster, by how long ranks wait for messages and by how fast the kernels sent them.

In a group of ranks, all wait for the slowest rank, and this rank waits least: only for messages. So the shortest wait
in a group does not grow if a device becomes slower. A window is the steps that one row of each rank covers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import Literal

from hpctrain.planner.adapt.straggler import ChangeDetector, ChangeLimits
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.plan.plan import Plan

NodePair = tuple[str, str]
"""Two nodes, in alphabetical order."""

WAIT_LIMITS = ChangeLimits(shift=math.log(1.5), least_noise=0.05)
"""Which changes of waits count as lasting: larger ones than of computation, because waits vary more, and a slightly
slower link matters little."""
LEAST_SHARE = 0.05
"""Share of the time of computation that is added to waits, so that a short wait that grows a little is no change."""
NEWEST_WINDOWS = 200
"""Most windows that are kept."""
LEAST_BYTES = 1 << 16
"""Fewest bytes of a window that show a bandwidth."""


@dataclass(frozen=True)
class MessageGroup:
    """Ranks that wait for each other's messages: a pipeline, or the replicas of a stage."""

    axis: Literal["pp", "dp"]
    ranks: tuple[int, ...]
    pairs: tuple[NodePair, ...]
    """Nodes between which their messages travel."""

    def wait_s(self, rows: Mapping[int, RankRow]) -> float:
        """Return the seconds a step for which the rank that waits least waits for messages along the group's axis.

        Args:
            rows: rank -> its row.
        """
        return min(rows[rank].wait_pp_s if self.axis == "pp" else rows[rank].wait_dp_s for rank in self.ranks)


def message_groups(plan: Plan) -> list[MessageGroup]:
    """Return the groups of a plan whose messages leave a node."""
    mesh, groups = plan.mesh(), list[MessageGroup]()
    for replica in range(plan.dp if plan.pp > 1 else 0):
        rows = plan.replicas[replica].devices
        hops = [(a.node, b.node) for one, other in pairwise(rows) for a, b in zip(one, other, strict=True)]
        groups += _group("pp", [rank for column in mesh for rank in column[replica]], hops)
    for column in mesh if plan.dp > 1 else []:
        for ranks in zip(*column, strict=True):
            nodes = dict.fromkeys(plan.ranks[rank].node for rank in ranks)
            groups += _group("dp", ranks, list(combinations(nodes, 2)))
    return groups


def _group(axis: Literal["pp", "dp"], ranks: Sequence[int], hops: Sequence[tuple[str, str]]) -> list[MessageGroup]:
    pairs = tuple(dict.fromkeys((min(hop), max(hop)) for hop in hops if hop[0] != hop[1]))
    return [MessageGroup(axis, tuple(ranks), pairs)] if pairs else []


@dataclass(frozen=True)
class LinkChange:
    """A lasting change of the time that messages take."""

    pairs: tuple[NodePair, ...]
    """Pairs of nodes between which the messages travel, without pairs that a group of ranks without a change uses,
    too. If there are several, the waits do not show on which of these links the change is."""
    extra_s: float
    """Seconds by which a step waits longer for these messages; negative if shorter."""
    factors: Mapping[NodePair, float]
    """Pair -> its bandwidth divided by the bandwidth before the change, for those of `pairs` whose messages were sent
    more slowly or faster than before, by the kernels' counters."""
    began: int
    """Index of the first window of the change."""


class PairBandwidths:
    """How fast messages travelled between two nodes in each window, as the kernels of both counted them."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """Begin without any window.

        Args:
            addresses: address of a node -> its name.
        """
        self._addresses = addresses
        self._windows: dict[NodePair, deque[tuple[int, float]]] = {}
        self._level_began = 0
        """Index of the first window since the last change."""

    def add(self, index: int, rows: Sequence[RankRow]) -> None:
        """Add a window whose rows say what was sent; other windows are skipped.

        Args:
            index: index of the window.
            rows: one row of each rank.
        """
        sent: dict[NodePair, tuple[float, float]] = {}
        for row in rows:
            node = DeviceId(row.device).node
            for traffic in row.traffic or []:
                other = self._addresses.get(traffic.address)
                if other is None or other == node or not 0 < traffic.busy_s < math.inf:
                    continue
                pair = (min(node, other), max(node, other))
                sent_bytes, busy_s = sent.get(pair, (0.0, 0.0))
                sent[pair] = sent_bytes + traffic.sent_bytes, busy_s + traffic.busy_s
        for pair, (sent_bytes, busy_s) in sent.items():
            if sent_bytes >= LEAST_BYTES:
                self._windows.setdefault(pair, deque(maxlen=NEWEST_WINDOWS)).append((index, sent_bytes / busy_s))

    def changes(self, pairs: Sequence[NodePair], began: int) -> dict[NodePair, float]:
        """Return pair -> its bandwidth since a window divided by the bandwidth before, for pairs whose bandwidth has
        changed.

        If all counted links of a node have changed, and these are two or more, the node's other links count as changed
        by the median of their factors.

        Args:
            pairs: the suspected links; no others are returned.
            began: index of the first window of the change.
        """
        factors: dict[NodePair, float] = {}
        for pair in self._windows:
            past = [value for index, value in self._windows[pair] if self._level_began <= index < began]
            since = [value for index, value in self._windows[pair] if index > began]  # it began within a window
            if past and since:
                factors[pair] = median(since) / median(past)
        changed = {pair: factor for pair, factor in factors.items() if abs(math.log(factor)) >= WAIT_LIMITS.shift}
        for node in {node for pair in pairs for node in pair}:
            known = {pair for pair in factors if node in pair}
            if len(known) > 1 and known <= set(changed):
                usual = median(changed[pair] for pair in known)
                changed |= {pair: usual for pair in pairs if node in pair and pair not in factors}
        suspects = {pair: factor for pair, factor in changed.items() if pair in pairs}
        self._level_began = began + 1 if suspects else self._level_began
        return suspects


class LinkWatch:
    """Watches the waits for messages while one plan runs and devices keep their speeds."""

    def __init__(self, plan: Plan, addresses: Mapping[str, str] | None = None) -> None:
        """Begin without any window.

        Args:
            plan: the plan that runs.
            addresses: address of a node -> its name, as far as addresses tell nodes apart.
        """
        self._groups = message_groups(plan)
        self._bandwidths = PairBandwidths({} if addresses is None else addresses)
        self._detector: ChangeDetector[int] = ChangeDetector(WAIT_LIMITS, peers=False)
        self._waits: deque[list[float]] = deque(maxlen=NEWEST_WINDOWS)
        """[window][group] -> seconds of its wait, divided by the factor by which devices compute longer than
        predicted."""
        self._count = 0
        self._floor_s = 0.0

    def add(self, rows: Sequence[RankRow], slowness: float) -> list[LinkChange]:
        """Add a window, and return the changes that it shows.

        Args:
            rows: one row of each rank.
            slowness: factor by which devices compute longer than predicted, as median over the devices.
        """
        by_rank = {row.rank: row for row in rows}
        scaled = [group.wait_s(by_rank) / slowness for group in self._groups]
        if not all(0 <= wait_s < math.inf for wait_s in scaled):
            return []
        if not self._waits:
            self._floor_s = LEAST_SHARE * median(row.compute_s / slowness for row in rows)
        self._waits.append(scaled)
        self._bandwidths.add(self._count, rows)
        self._count += 1
        changes = self._detector.add({group: math.log(wait + self._floor_s) for group, wait in enumerate(scaled)})
        changed = {change.key for change in changes}
        quiet = {pair for index, group in enumerate(self._groups) if index not in changed for pair in group.pairs}
        links = []
        for change in changes:
            waits = [window[change.key] for window in self._waits]
            began = max(0, change.began - (self._count - len(waits)))
            past, since = waits[:began], waits[began:]
            pairs = self._groups[change.key].pairs
            pairs = tuple(pair for pair in pairs if len(pairs) == 1 or pair not in quiet)
            extra_s = (median(since) - median(past)) * slowness if past else 0.0
            links.append(LinkChange(pairs, extra_s, self._bandwidths.changes(pairs, change.began), change.began))
        return links
