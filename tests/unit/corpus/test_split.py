"""What is kept aside, from the bytes of the passages in each bucket of hashes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.corpus.input.passages import BUCKETS, bucket_of, digest_of
from hpctrain.corpus.prepare.scan import no_bytes, smallest, validation_buckets


@given(
    sizes=st.dictionaries(st.integers(0, BUCKETS - 1), st.integers(1, 10**6), min_size=2, max_size=50),
    fraction=st.floats(0.001, 0.999),
)
def test_as_much_as_fits_but_something_and_never_all(sizes: dict[int, int], fraction: float) -> None:
    buckets = no_bytes()
    buckets[list(sizes)] = list(sizes.values())
    chosen = validation_buckets(buckets, fraction)
    aside, whole = buckets[list(chosen)].sum(), buckets.sum()
    assert 0 < aside < whole
    following = buckets[chosen.stop :][buckets[chosen.stop :] > 0]
    if buckets[min(sizes)] > fraction * whole:
        assert aside == min(sizes.values()) <= whole / 2
    else:
        assert chosen.start == 0
        assert aside <= fraction * whole
        assert aside + following[0] > fraction * whole or len(following) == 1


def test_text_that_repeats_itself_is_not_all_for_validation() -> None:
    """Equal passages go the same way: a file of one passage over and over is two buckets, one of them nearly empty."""
    buckets = no_bytes()
    buckets[[5, 9]] = 18_432, 1_568
    assert validation_buckets(buckets, 0.01) == range(9, 10)
    assert validation_buckets(buckets, 0.93) == range(9)


@pytest.mark.parametrize(("filled", "fraction"), [([], 0.5), ([7], 0.5), ([7, 9], 0.0)])
def test_nothing_is_kept_aside_of_one_text_or_when_nothing_shall_be(filled: list[int], fraction: float) -> None:
    buckets = no_bytes()
    buckets[filled] = 10
    assert not validation_buckets(buckets, fraction)


def test_documents_spread_over_the_buckets() -> None:
    sizes = np.bincount([bucket_of(digest_of(f"document {n}")) for n in range(5000)], minlength=BUCKETS)
    below = sizes[list(validation_buckets(sizes, 0.1))].sum()
    assert below == pytest.approx(500, abs=5)


def test_the_sample_is_the_smallest_ranks_that_fit_whatever_their_order() -> None:
    texts = [(rank * 7919 % 101, f"{rank:03}") for rank in range(100)]
    expected = sorted(texts)[:10]
    assert smallest([texts], 30) == expected
    assert smallest([texts[60:], texts[:60]], 31) == expected
    assert smallest([[(5, "longer than that")]], 3) == [(5, "longer than that")]
