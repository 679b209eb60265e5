"""Array types of the bounds, and the constants that several bounds use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

INFEASIBLE = -1e6
"""Number of blocks or micro-batches that stands for "impossible" in the arrays of a bound."""
ROUNDING = 1e-9
"""Relative rounding error that a bound allows for in sums of seconds."""
