"""Each node against its peers, pure: what it does with its partners, each pair relative to the pairs of its kind.

Bandwidth is what a node reaches with its better partners: what others take from a shared uplink, or a slow partner,
must not count against it. A slow port is slow with all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpctrain.probe.measure.clusters import SwitchTree
from hpctrain.records.topology.pair_matrix import PairMatrix

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int_]

BANDWIDTH_QUANTILE = 0.9
OUTLIER_DEVIATIONS = 4.0
"""A node is suspect beyond so many deviations (1.4826 MAD) of all nodes: in a crowded fabric they differ by chance."""
LATENCY_WARN, LATENCY_EXCLUDE = 1.15, 1.5
"""Median latency over that of the peers: above the first a node is suspect, above the second it is left out."""
LATENCY_FLOOR_S = 5e-6
"""Smaller differences are those of two processors, not of two networks."""
MIN_PAIRS_BELOW_SWITCH = 4
LINK_SUSPECT = 0.6
"""A link below this share of what its ends and its kind promise is measured again by itself."""


@dataclass(frozen=True)
class RelativePerformance:
    """Where the nodes stand, by index; NaN for a node that measured nothing."""

    sent: Floats
    """Ninth decile over the partners of bandwidth from this node, relative to the median of all nodes."""
    received: Floats
    latency: Floats
    """Median over the partners, relative to the median of all nodes."""
    latency_excess_s: Floats
    partners: Ints
    """Measured partners behind these medians."""

    @property
    def bandwidth(self) -> Floats:
        """The worse direction."""
        return np.fmin(self.sent, self.received)


def relative_performance(matrix: PairMatrix, tree: SwitchTree) -> RelativePerformance:
    """Where each node stands among its peers."""
    rate = np.where(np.isnan(matrix["bytes_per_s"]), matrix["isolated_bytes_per_s"], matrix["bytes_per_s"])
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
    """Nodes that are to be measured again, the worst first."""
    behind = np.zeros(len(now.sent), dtype=bool)
    for values in (now.sent, now.received):
        behind |= (values < slow_ratio) & (1 - values > OUTLIER_DEVIATIONS * _spread(values))
    behind |= is_late(now)
    order = np.argsort(np.nan_to_num(np.fmin(now.bandwidth, 1 / now.latency), nan=1.0), kind="stable")
    return [int(node) for node in order if behind[node]]


def is_late(now: RelativePerformance) -> npt.NDArray[np.bool_]:
    """Nodes whose latency is clearly above that of their peers."""
    late = (now.latency > LATENCY_WARN) & (now.latency_excess_s > LATENCY_FLOOR_S)
    clear: npt.NDArray[np.bool_] = late & (now.latency - 1 > OUTLIER_DEVIATIONS * _spread(now.latency))
    return clear


def suspect_links(matrix: PairMatrix, tree: SwitchTree, now: RelativePerformance, most: int) -> list[tuple[int, int]]:
    """Links far below what their two ends do with others, the worst first, at most `most`."""
    rate = np.where(np.isnan(matrix["bytes_per_s"]), matrix["isolated_bytes_per_s"], matrix["bytes_per_s"])
    promised = np.minimum(now.sent[:, None], now.received[None, :])
    with np.errstate(invalid="ignore", divide="ignore"):
        share = _by_kind(rate, tree) / promised
    worst = np.fmin(share, share.T)
    rows, columns = np.nonzero(np.triu(worst < LINK_SUSPECT, 1))
    order = np.argsort(worst[rows, columns], kind="stable")[:most]
    return [(int(rows[place]), int(columns[place])) for place in order]


def _unshared(relative: Floats, tree: SwitchTree) -> Floats:
    """Only the pairs below one switch, for nodes with enough of them: those share no uplink with anyone."""
    if not tree.levels:
        return relative
    below = (tree.pair_levels == 1) & np.isfinite(relative)
    enough = below.sum(axis=1) >= MIN_PAIRS_BELOW_SWITCH
    return np.where(below | ~(enough[:, None] & enough[None, :]), relative, np.nan)


def _by_kind(values: Floats, tree: SwitchTree) -> Floats:
    """Each pair over the median of the pairs that leave switches of the same height."""
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
    """Robust standard deviation; 0 where there are too few values for one."""
    kept = values[np.isfinite(values)]
    return float(1.4826 * np.median(np.abs(kept - np.median(kept)))) if len(kept) > 3 else 0.0


def _median(values: Floats) -> float:
    kept = values[np.isfinite(values)]
    return float(np.median(kept)) if len(kept) else float("nan")


def _quantile_rows(values: Floats, share: float) -> Floats:
    """Quantile of each row without its NaN (nearest rank); by one sort, because numpy's own takes a Python loop."""
    ordered = np.sort(values, axis=1)  # NaN last
    counts = np.isfinite(values).sum(axis=1)
    place = np.floor(share * np.maximum(counts - 1, 0) + 0.5).astype(np.int_)
    return np.where(counts > 0, ordered[np.arange(len(values)), place], np.nan)
