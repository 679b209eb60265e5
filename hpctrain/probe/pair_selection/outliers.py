"""Finds nodes and links that are slower than the others. Each pair is compared with the pairs that cross the same
switch level. Pure.

A node's bandwidth is the 90th percentile over its partners, so that traffic on a shared uplink, or a slow partner, does
not count against the node. A slow port is slow with every partner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpctrain.probe.pair_selection.switches import SwitchTree
from hpctrain.records.topology.pair_matrix import PairMatrix

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int_]

BANDWIDTH_QUANTILE = 0.9
"""Quantile over a node's partners that counts as the node's bandwidth."""
OUTLIER_DEVIATIONS = 4.0
"""Fewest robust standard deviations (1.4826 × the median absolute deviation over all nodes) between a suspect and the
median. On a busy network, nodes differ by chance."""
LATENCY_WARN, LATENCY_EXCLUDE = 1.15, 1.5
"""Ratio of a node's median latency to the median of all nodes. Above `LATENCY_WARN` the node is suspect. Above
`LATENCY_EXCLUDE`, also in its retest, it is excluded."""
LATENCY_FLOOR_S = 5e-6
"""Smallest excess of a node's latency over the median that counts, in seconds. Smaller ones come from the processors,
not from the network."""
MIN_PAIRS_BELOW_SWITCH = 4
"""Fewest measured pairs below a node's leaf switch with which its pairs across switches are ignored."""
LINK_SUSPECT = 0.6
"""A link is measured again if its bandwidth is below this share of what its two nodes reach with other partners across
the same switch level."""


@dataclass(frozen=True)
class RelativePerformance:
    """Figures of each node relative to the median of all nodes, as arrays by the node's index. A ratio is NaN for a
    node without measurements. `latency_excess_s` is in seconds, `partners` counts measured partners."""

    sent: Floats
    """Bandwidth from the node, 90th percentile over its partners, relative to the median of all nodes."""
    received: Floats
    """Bandwidth to the node, computed in the same way as `sent`."""
    latency: Floats
    """Median latency over the partners, relative to the median of all nodes."""
    latency_excess_s: Floats
    """Seconds by which the node's median latency is above the median of all nodes."""
    partners: Ints
    """Number of partners with which a bandwidth was measured."""

    @property
    def bandwidth(self) -> Floats:
        """[node] -> bandwidth of the node's slower direction, relative to the median of all nodes: the smaller one of
        `sent` and `received`."""
        return np.fmin(self.sent, self.received)


def relative_performance(matrix: PairMatrix, tree: SwitchTree) -> RelativePerformance:
    """Return each node's bandwidth and latency relative to the median of all nodes. Each pair's figure is first divided
    by the median of the pairs that cross the same switch level, so that far partners do not count against a node."""
    rate = matrix.rate
    relative = _unshared(_by_kind(rate, tree), tree)
    seconds = matrix["latency_p50_s"]
    slow = _quantile_rows(_by_kind(seconds, tree), 0.5)
    slow_ratio = slow / _median(slow)
    return RelativePerformance(
        sent=_relative(_quantile_rows(relative, BANDWIDTH_QUANTILE)),
        received=_relative(_quantile_rows(relative.T, BANDWIDTH_QUANTILE)),
        latency=slow_ratio,
        latency_excess_s=(slow_ratio - 1) * _median(seconds.ravel()),
        partners=np.isfinite(rate).sum(axis=1),
    )


def suspects(now: RelativePerformance, slow_ratio: float) -> list[int]:
    """Return the indexes of the nodes to measure again, the slowest first.

    A node is a suspect if its latency is clearly high (`is_late`), or if its bandwidth in one direction is below
    `slow_ratio` of the median of all nodes and an outlier (`OUTLIER_DEVIATIONS`).
    """
    behind = np.zeros(len(now.sent), dtype=bool)
    for values in (now.sent, now.received):
        behind |= (values < slow_ratio) & (1 - values > OUTLIER_DEVIATIONS * _spread(values))
    behind |= is_late(now)
    order = np.argsort(np.nan_to_num(np.fmin(now.bandwidth, 1 / now.latency), nan=1.0), kind="stable")
    return [int(node) for node in order if behind[node]]


def is_late(now: RelativePerformance) -> npt.NDArray[np.bool_]:
    """Return [node] -> whether the node's latency is above the median of all nodes by each of three measures: more than
    `LATENCY_WARN` times the median, more than `LATENCY_FLOOR_S` seconds above it, and more than `OUTLIER_DEVIATIONS`
    robust standard deviations above it."""
    late = (now.latency > LATENCY_WARN) & (now.latency_excess_s > LATENCY_FLOOR_S)
    clear: npt.NDArray[np.bool_] = late & (now.latency - 1 > OUTLIER_DEVIATIONS * _spread(now.latency))
    return clear


def suspect_links(matrix: PairMatrix, tree: SwitchTree, now: RelativePerformance, most: int) -> list[tuple[int, int]]:
    """Return up to `most` links as (a, b), node indexes with a < b, the worst first. The bandwidth of each is far below
    what its two nodes reach with other partners (`LINK_SUSPECT`).

    Args:
        now: figures of the nodes by the measurements so far.
    """
    rate = matrix.rate
    promised = np.minimum(now.sent[:, None], now.received[None, :])
    with np.errstate(invalid="ignore", divide="ignore"):
        share = _by_kind(rate, tree) / promised
    worst = np.fmin(share, share.T)
    rows, columns = np.nonzero(np.triu(worst < LINK_SUSPECT, 1))
    order = np.argsort(worst[rows, columns], kind="stable")[:most]
    return [(int(rows[place]), int(columns[place])) for place in order]


def _unshared(relative: Floats, tree: SwitchTree) -> Floats:
    """Return a copy of `relative` with NaN for each pair across leaf switches whose two nodes both have
    `MIN_PAIRS_BELOW_SWITCH` measured pairs below their own leaf switches. Pairs below a leaf switch share no uplink
    with other pairs.

    Args:
        relative: [a, b] -> bandwidth of the pair, divided by the median over the pairs that cross the same switch
            level.
    """
    if not tree.levels:
        return relative
    below = (tree.pair_levels == 1) & np.isfinite(relative)
    enough = below.sum(axis=1) >= MIN_PAIRS_BELOW_SWITCH
    return np.where(below | ~(enough[:, None] & enough[None, :]), relative, np.nan)


def _by_kind(values: Floats, tree: SwitchTree) -> Floats:
    """Return an array [a, b]: each pair's value divided by the median over the pairs that cross the same switch level.
    Without known switches it is the median over all pairs."""
    if not tree.levels:
        return values / _median(values.ravel())
    made = np.full(values.shape, np.nan)
    for level in range(len(tree.levels) + 1):
        kind = (tree.pair_levels == level) & np.isfinite(values)
        if kind.any():
            made[kind] = values[kind] / np.median(values[kind])
    return made


def _relative(values: Floats) -> Floats:
    return values / _median(values)


def _spread(values: Floats) -> float:
    """Return the robust standard deviation of the finite values (1.4826 × the median absolute deviation); 0 with three
    values or fewer."""
    finite = values[np.isfinite(values)]
    return float(1.4826 * np.median(np.abs(finite - np.median(finite)))) if len(finite) > 3 else 0.0


def _median(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


def _quantile_rows(values: Floats, share: float) -> Floats:
    """Return the quantile `share` of each row by nearest rank, ignoring NaN; NaN for a row without values. The function
    sorts once, because numpy's nanquantile loops over the rows in Python."""
    ordered = np.sort(values, axis=1)  # NaN last
    counts = np.isfinite(values).sum(axis=1)
    place = np.floor(share * np.maximum(counts - 1, 0) + 0.5).astype(np.int_)
    return np.where(counts > 0, ordered[np.arange(len(values)), place], np.nan)
