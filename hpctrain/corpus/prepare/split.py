"""Which passages are kept aside for validation: decided by their content, with memory that does not grow with it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.corpus.input.passages import BUCKETS


def validation_buckets(bytes_in_bucket: NDArray[np.int64], fraction: float) -> range:
    """Passages in these buckets go to validation: as many whole buckets as fit into `fraction` of the bytes, from the
    first on; where none fits, the one with the least text.

    The order of the files does not matter and equal passages go the same way. With a fraction above 0 there is at least
    one bucket, unless all the text lies in one; that of the least text holds half of the text at most.

    Args:
        bytes_in_bucket: bytes of all passages in each bucket, [BUCKETS].
    """
    filled = np.flatnonzero(bytes_in_bucket)
    if fraction <= 0 or len(filled) < 2:
        return range(0)
    sums = np.cumsum(bytes_in_bucket)
    limit = int(np.searchsorted(sums, fraction * sums[-1], side="right"))
    if limit > filled[0]:
        return range(min(limit, int(filled[-1])))
    least = int(filled[np.argmin(bytes_in_bucket[filled])])
    return range(least, least + 1)


def no_bytes() -> NDArray[np.int64]:
    """Empty buckets."""
    return np.zeros(BUCKETS, dtype=np.int64)
