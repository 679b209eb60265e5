"""Weighted folders: exact shares in every prefix, an epoch of its own for each, one sequence for every plan."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.read.mixture import (
    PERIOD,
    Mixture,
    counts_of,
    locate_samples,
    open_training,
    order_of,
    short_names,
)
from hpctrain.corpus.read.tokens import Corpus

LENGTH = 32


@given(st.lists(st.integers(1, 120), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_no_prefix_strays_by_a_sample_from_any_share(weights: list[int]) -> None:
    counts = np.array(counts_of(weights))
    assert (counts * sum(weights) == np.array(weights) * counts.sum()).all()
    order = order_of(tuple(counts.tolist()))
    sources, numbers = locate_samples(order, np.arange(2 * counts.sum() + 3))
    taken = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    due = np.arange(1, len(sources) + 1)[:, None] * counts / counts.sum()
    assert np.abs(taken - due).max() < 1
    for source in range(len(weights)):
        assert (numbers[sources == source] == np.arange(taken[-1, source])).all()


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6))
def test_shares_that_need_a_long_period_are_rounded_and_none_is_lost(weights: list[float]) -> None:
    counts = counts_of(weights)
    assert sum(counts) <= PERIOD
    assert min(counts) >= 1
    shares = np.array(weights) / sum(weights)
    assert np.abs(np.array(counts) / sum(counts) - shares).max() <= len(weights) / PERIOD


def test_decimal_weights_are_taken_as_written() -> None:
    assert counts_of([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert counts_of([3, 1]) == (3, 1)
    assert sum(counts_of([1 / 3, 1])) == PERIOD


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three folders of different sizes; their texts have no byte in common."""
    base = tmp_path_factory.mktemp("mixture")
    for name, letters, size in (("big", "abcd", 9000), ("small", "efgh", 1500), ("tiny", "ijkl", 400)):
        text = "".join(np.random.default_rng(size).choice(list(letters), size))
        (base / f"{name}.txt").write_text(text)
        prepare([base / f"{name}.txt"], base / name, PrepareOptions(valid_fraction=0.0))
    return [str(base / name) for name in ("big", "small", "tiny")]


def test_samples_come_from_folders_in_their_shares_and_each_goes_through_epochs(folders: list[str]) -> None:
    mixture = open_training(folders, [0.5, 0.3, 0.2], LENGTH)
    assert isinstance(mixture, Mixture)
    rows = mixture.rows(7, 0, 400)
    letters = [set(b"abcd"), set(b"efgh"), set(b"ijkl")]
    found = np.array([next(i for i, own in enumerate(letters) if set(row.tolist()) <= own | {256}) for row in rows])
    assert mixture.taken(400) == {"big": 200, "small": 120, "tiny": 80}
    assert {i: int((found == i).sum()) for i in range(3)} == {0: 200, 1: 120, 2: 80}
    assert mixture.taken(137) == dict(zip(("big", "small", "tiny"), np.bincount(found[:137]).tolist(), strict=True))
    for source, corpus in enumerate(mixture.corpora):
        own = rows[found == source]
        whole = {row.tobytes() for row in corpus.read_windows(np.arange(corpus.windows))}
        for epoch in range(len(own) // corpus.windows):
            part = own[epoch * corpus.windows : (epoch + 1) * corpus.windows]
            assert {row.tobytes() for row in part} == whole


def test_the_sequence_does_not_depend_on_how_it_is_asked_for(folders: list[str]) -> None:
    whole = open_training(folders, [5, 3, 2], LENGTH).rows(3, 50, 60)
    again = open_training(folders, [5, 3, 2], LENGTH)
    for cuts in ((50, 51, 110), (50, 66, 82, 98, 110), tuple(range(50, 111))):
        parts = [again.rows(3, start, stop - start) for start, stop in itertools.pairwise(cuts)]
        assert (np.concatenate(parts) == whole).all()
    assert (again.rows(4, 50, 60) != whole).any()


def test_without_weights_folders_are_shuffled_together(folders: list[str]) -> None:
    together = open_training(folders, None, LENGTH)
    assert isinstance(together, Corpus)
    assert (together.rows(1, 0, 9) == Corpus.open(folders, "train", LENGTH).rows(1, 0, 9)).all()


def test_folders_of_one_name_go_by_their_paths() -> None:
    assert short_names(["/a/web", "/b/code"]) == ["web", "code"]
    assert short_names(["/a/web", "/b/web"]) == ["/a/web", "/b/web"]
