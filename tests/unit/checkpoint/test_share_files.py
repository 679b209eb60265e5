"""Which rank hashes which file of a checkpoint that all ranks load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.load import share_files


def test_a_rank_hashes_the_file_that_only_it_reads() -> None:
    readers = {"a": [0], "b": [1], "c": [2]}
    assert share_files(readers, {"a": 5, "b": 7, "c": 0}, 3) == [["a"], ["b"], ["c"]]


def test_files_that_all_read_are_shared_evenly() -> None:
    everyone = [0, 1, 2]
    sizes = {"a": 60, "b": 30, "c": 30, "d": 30, "e": 30}
    shares = share_files(dict.fromkeys(sizes, everyone), sizes, 3)
    assert [sum(sizes[name] for name in share) for share in shares] == [60, 60, 60]


@given(st.data())
def test_every_file_goes_to_one_of_its_readers(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 8))
    sizes = data.draw(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 100)))
    some_ranks = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True)
    readers = {name: data.draw(some_ranks) for name in sizes}
    shares = share_files(readers, sizes, ranks)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert all(rank in readers[name] for rank, share in enumerate(shares) for name in share)
