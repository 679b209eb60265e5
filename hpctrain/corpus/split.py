"""Which passages are kept aside for validation: decided by their content, with memory that does not grow with it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.corpus.passages import BUCKETS


def validation_limit(bytes_in_bucket: NDArray[np.int64], fraction: float) -> int:
    """Passages in buckets below this go to validation: as many whole buckets as fit into `fraction` of the bytes.

    The order of the files does not matter and equal passages go the same way. With a fraction above 0 there is at least
    one bucket, unless all the text lies in one.

    Args:
        bytes_in_bucket: bytes of all passages in each bucket, [BUCKETS].
    """
    filled = np.flatnonzero(bytes_in_bucket)
    if fraction <= 0 or len(filled) < 2:
        return 0
    sums = np.cumsum(bytes_in_bucket)
    limit = int(np.searchsorted(sums, fraction * sums[-1], side="right"))
    return min(max(limit, int(filled[0]) + 1), int(filled[-1]))


def no_bytes() -> NDArray[np.int64]:
    """Empty buckets."""
    return np.zeros(BUCKETS, dtype=np.int64)
