"""The degrees of parallelism of a plan as one value."""

from __future__ import annotations

from typing import NamedTuple


class ParallelDims(NamedTuple):
    """The degrees pp (pipeline ranks of a replica), dp (replicas) and tp (devices that share each matrix)."""

    pp: int
    dp: int
    tp: int

    def __str__(self) -> str:
        """Return the degrees as text: 'pp 2 × dp 1 × tp 1'."""
        return f"pp {self.pp} × dp {self.dp} × tp {self.tp}"
