"""Finds differences between the pair matrices of two large topologies. Pure.

A million pairs as keys of a dictionary take a gigabyte, so arrays are compared and only differences become objects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from hpctrain.records.topology.pair_matrix import PairMatrix

FIGURES = (
    ("isolated_bytes_per_s", "bandwidth", "B/s"),
    ("bytes_per_s", "bandwidth under load", "B/s"),
    ("latency_p50_s", "latency", "s"),
)  # fmt: skip


@dataclass(frozen=True)
class PairChange:
    """One figure of a directed pair of nodes that differs between two files; a value is None where the file lacks
    it."""

    source: str
    target: str
    what: str
    unit: str
    before: float | None
    after: float | None


def pair_changes(
    before: PairMatrix, after: PairMatrix, names: Collection[str], tolerance: float
) -> Iterator[PairChange]:
    """Yield figures that differ by more than `tolerance` (0.1 is 10 %) of the earlier value, or that one file lacks.

    Args:
        names: nodes that both files have.
    """
    both = [name for name in before.nodes if name in names]
    old_at = np.ix_(*[[before.index[name] for name in both]] * 2)
    new_at = np.ix_(*[[after.index[name] for name in both]] * 2)
    for figure, what, unit in FIGURES:
        old, new = before[figure][old_at].astype(np.float64), after[figure][new_at].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            differs = (np.abs(new / old - 1) > tolerance) | (np.isnan(old) != np.isnan(new))
        for row, column in zip(*(places.tolist() for places in np.nonzero(differs)), strict=True):
            yield PairChange(
                both[row], both[column], what, unit, _known(old[row, column]), _known(new[row, column])
            )  # fmt: skip


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
