"""Array types of the bounds, and the constants that several bounds use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

INFEASIBLE = -1e6
"""Value in the arrays of a bound that stands for "impossible" where a number of blocks or micro-batches is expected."""
ROUNDING = 1e-9
"""Relative rounding error for which a bound allows in sums of seconds."""
