"""Choose the validation passages by their content, in constant memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.corpus.input.passages import BUCKETS


def validation_buckets(bytes_in_bucket: NDArray[np.int64], fraction: float) -> range:
    """The buckets whose passages are for validation: as many whole buckets as fit into `fraction` of the bytes, from
    the first on; if none fits, the one with the least text.

    The order of the files does not matter, and equal passages are in the same split. With a fraction above 0 there is
    at least one bucket, unless all the text is in one bucket. The bucket with the least text holds at most half of it.

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
    """Zero bytes in each bucket, [BUCKETS]."""
    return np.zeros(BUCKETS, dtype=np.int64)
