"""Types of the arrays that bounds compute with, and the numbers that they share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

INFEASIBLE = -1e6
"""Stands for the blocks or micro-batches of something impossible."""
ROUNDING = 1e-9
"""Relative error that sums of times may have."""
