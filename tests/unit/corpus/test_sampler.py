"""Every window once an epoch, in an order that depends on nothing but the seed and the sample's number."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.corpus.read.tokens import sample

SEEDS = st.integers(0, 2**63 - 1)


def stream(seed: int, start: int, stop: int, windows: int) -> tuple[np.ndarray, np.ndarray]:
    return sample(seed, np.arange(start, stop, dtype=np.int64), windows)


@given(SEEDS, st.integers(1, 3000), st.integers(0, 10**6))
def test_each_epoch_has_every_window_exactly_once(seed: int, windows: int, number: int) -> None:
    epoch, window = stream(seed, number * windows, (number + 1) * windows, windows)
    assert (epoch == number).all()
    assert (np.sort(window) == np.arange(windows)).all()


@given(SEEDS, st.integers(1, 500), st.integers(0, 2000), st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_the_stream_does_not_depend_on_how_it_is_asked_for(
    seed: int, windows: int, start: int, parts: list[int]
) -> None:
    whole = stream(seed, start, start + sum(parts), windows)
    edges = [start + sum(parts[:index]) for index in range(len(parts) + 1)]
    pieces = [stream(seed, a, b, windows) for a, b in itertools.pairwise(edges)]
    for column in (0, 1):
        assert (np.concatenate([piece[column] for piece in pieces]) == whole[column]).all()


@given(SEEDS, st.integers(64, 2000), st.integers(0, 1000))
def test_epochs_and_seeds_have_orders_of_their_own(seed: int, windows: int, epoch: int) -> None:
    _, this = stream(seed, epoch * windows, (epoch + 1) * windows, windows)
    _, following = stream(seed, (epoch + 1) * windows, (epoch + 2) * windows, windows)
    _, other_seed = stream(seed ^ 1, epoch * windows, (epoch + 1) * windows, windows)
    # Two random orders agree in one place on average; in sixteen with probability below 1e-13.
    for other in (following, other_seed, np.arange(windows)):
        assert (this == other).sum() < 16


def test_positions_are_uniform_over_windows() -> None:
    windows, epochs = 10, 4000
    _, window = stream(7, 0, windows * epochs, windows)
    for position in range(windows):
        counts = np.bincount(window[position::windows], minlength=windows)
        # Chi-square with nine degrees of freedom: above 33.7 once in ten thousand.
        assert ((counts - epochs / windows) ** 2 / (epochs / windows)).sum() < 33.7


def test_neighbours_in_the_text_are_not_neighbours_in_the_stream() -> None:
    _, window = stream(3, 0, 10_000, 10_000)
    assert (np.abs(np.diff(window)) == 1).mean() < 0.002


def test_a_corpus_of_billions_of_windows_needs_no_memory() -> None:
    windows = 10**12 + 39
    epoch, window = stream(1, windows - 500, windows + 500, windows)
    assert epoch.tolist() == [0] * 500 + [1] * 500
    assert ((window >= 0) & (window < windows)).all()
    assert len(set(window.tolist())) == 1000


def test_the_order_is_the_recorded_one() -> None:
    """A run that is resumed by a later version must see the samples that it would have seen."""
    assert stream(0, 0, 12, 10)[1].tolist() == [0, 8, 6, 4, 9, 3, 1, 2, 5, 7, 1, 0]


def test_no_windows_is_an_error() -> None:
    with pytest.raises(ValueError, match="windows: found 0"):
        stream(0, 0, 1, 0)
