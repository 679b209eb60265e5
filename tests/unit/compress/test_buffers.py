"""Memory that is reused: which requests get a buffer again, and how many buffers there are."""

from __future__ import annotations

import weakref

import pytest
import torch

from hpctrain.compress.codecs.buffers import BufferPool

LIKE = torch.zeros(1)


@pytest.mark.parametrize(("same_size", "reused"), [(False, True), (True, False)])
def test_a_smaller_request_reuses_a_buffer_unless_sizes_must_be_equal(same_size: bool, reused: bool) -> None:
    pool = BufferPool(same_size)
    first = pool.take(8, LIKE)
    place = first.data_ptr()
    pool.give_back(first)
    second = pool.take(6, LIKE)
    assert second.shape == (6,)
    assert (second.data_ptr() == place) is reused
    assert pool.take(8, LIKE, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("bounded", [True, False])
def test_a_bounded_pool_frees_a_buffer_before_it_makes_one_of_another_size(bounded: bool) -> None:
    pool = BufferPool(same_size=True, bounded=bounded)
    first = pool.take(8, LIKE)
    seen: list[bool] = []

    class Watch:
        def new_empty(self, numbers: int, dtype: torch.dtype) -> torch.Tensor:
            seen.append(alive() is None)
            return torch.empty(numbers, dtype=dtype)

    alive = weakref.ref(first)
    pool.give_back(first)
    del first
    pool.take(9, Watch())  # type: ignore[arg-type]
    assert seen == [bounded]
