"""Finds nodes and links that are slower than their peers. Each pair is compared with the pairs of its class. Pure.

A node's bandwidth is its bandwidth with its better partners, so that traffic on a shared uplink, or a slow partner,
does not count against the node. A slow port is slow with every partner.
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
OUTLIER_DEVIATIONS = 4.0
"""A node is suspect beyond this many robust standard deviations (1.4826 MAD) of all nodes; on a busy network, nodes
differ by chance."""
LATENCY_WARN, LATENCY_EXCLUDE = 1.15, 1.5
"""Ratio of the median latency to that of the peers: above the first a node is suspect, above the second excluded."""
LATENCY_FLOOR_S = 5e-6
"""Smallest difference of latencies in seconds that counts: smaller ones come from the processors, not from the
network."""
MIN_PAIRS_BELOW_SWITCH = 4
LINK_SUSPECT = 0.6
"""A link below this share of the bandwidth expected from its ends and its class is measured again."""


@dataclass(frozen=True)
class RelativePerformance:
    """The performance of each node relative to all nodes, by index; NaN for a node without measurements."""

    sent: Floats
    """Bandwidth from this node, 90th percentile over its partners, relative to the median of all nodes."""
    received: Floats
    latency: Floats
    """Median latency over the partners, relative to the median of all nodes."""
    latency_excess_s: Floats
    partners: Ints
    """Number of measured partners."""

    @property
    def bandwidth(self) -> Floats:
        """Relative bandwidth of the slower direction."""
        return np.fmin(self.sent, self.received)


def relative_performance(matrix: PairMatrix, tree: SwitchTree) -> RelativePerformance:
    """Return the performance of each node relative to its peers."""
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
    """Return the nodes to measure again, the worst first."""
    behind = np.zeros(len(now.sent), dtype=bool)
    for values in (now.sent, now.received):
        behind |= (values < slow_ratio) & (1 - values > OUTLIER_DEVIATIONS * _spread(values))
    behind |= is_late(now)
    order = np.argsort(np.nan_to_num(np.fmin(now.bandwidth, 1 / now.latency), nan=1.0), kind="stable")
    return [int(node) for node in order if behind[node]]


def is_late(now: RelativePerformance) -> npt.NDArray[np.bool_]:
    """Return for each node whether its latency is clearly above that of its peers."""
    late = (now.latency > LATENCY_WARN) & (now.latency_excess_s > LATENCY_FLOOR_S)
    clear: npt.NDArray[np.bool_] = late & (now.latency - 1 > OUTLIER_DEVIATIONS * _spread(now.latency))
    return clear


def suspect_links(matrix: PairMatrix, tree: SwitchTree, now: RelativePerformance, most: int) -> list[tuple[int, int]]:
    """Return up to `most` links far below the bandwidth of their two ends with other partners, the worst first."""
    rate = matrix.rate
    promised = np.minimum(now.sent[:, None], now.received[None, :])
    with np.errstate(invalid="ignore", divide="ignore"):
        share = _by_kind(rate, tree) / promised
    worst = np.fmin(share, share.T)
    rows, columns = np.nonzero(np.triu(worst < LINK_SUSPECT, 1))
    order = np.argsort(worst[rows, columns], kind="stable")[:most]
    return [(int(rows[place]), int(columns[place])) for place in order]


def _unshared(relative: Floats, tree: SwitchTree) -> Floats:
    """Return the figures without pairs across switches, for nodes that have enough pairs below one switch. Such pairs
    share no uplink with others."""
    if not tree.levels:
        return relative
    below = (tree.pair_levels == 1) & np.isfinite(relative)
    enough = below.sum(axis=1) >= MIN_PAIRS_BELOW_SWITCH
    return np.where(below | ~(enough[:, None] & enough[None, :]), relative, np.nan)


def _by_kind(values: Floats, tree: SwitchTree) -> Floats:
    """Return each pair's value divided by the median over the pairs that cross the same switch level."""
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
    """Return the robust standard deviation; 0 with too few values."""
    finite = values[np.isfinite(values)]
    return float(1.4826 * np.median(np.abs(finite - np.median(finite)))) if len(finite) > 3 else 0.0


def _median(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


def _quantile_rows(values: Floats, share: float) -> Floats:
    """Return the quantile of each row, ignoring NaN (nearest rank). It sorts once, because numpy's nanquantile is a
    Python loop."""
    ordered = np.sort(values, axis=1)  # NaN last
    counts = np.isfinite(values).sum(axis=1)
    place = np.floor(share * np.maximum(counts - 1, 0) + 0.5).astype(np.int_)
    return np.where(counts > 0, ordered[np.arange(len(values)), place], np.nan)
