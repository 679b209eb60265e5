"""Batches that are read ahead are those that would have been read when asked for."""

from __future__ import annotations

import threading

import pytest
import torch

from hpctrain.worker.batch_loader import BatchPrefetcher, SampleBatch


class Numbers:
    """A loader whose batches are the numbers of their samples."""

    def __init__(self, bad: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.reads: list[tuple[int, int, int]] = []
        self.threads: set[str] = set()
        self._bad = bad

    def read(self, seed: int, start: int, count: int) -> SampleBatch:
        self.reads.append((seed, start, count))
        self.threads.add(threading.current_thread().name)
        if start == self._bad:
            raise OSError("the disk is gone")
        values = torch.arange(start, start + count)
        return SampleBatch(values, values + 1, None)

    def to_device(self, batch: SampleBatch) -> SampleBatch:
        return batch


def test_each_batch_but_the_first_was_read_in_the_thread() -> None:
    loader = Numbers()
    prefetcher = BatchPrefetcher(loader)  # type: ignore[arg-type]
    for step in range(4):
        batch = prefetcher.batch(7, 8 * step + 2, 3, 8)
        assert batch.inputs.tolist() == [8 * step + 2, 8 * step + 3, 8 * step + 4]
    assert len({thread for thread in loader.threads if thread.startswith("batch")}) == 1
    assert sorted(set(loader.reads)) == [(7, 8 * step + 2, 3) for step in range(len(set(loader.reads)))]
    assert loader.reads.count((7, 10, 3)) == loader.reads.count((7, 18, 3)) == 1


def test_another_batch_than_the_next_is_read_anew() -> None:
    prefetcher = BatchPrefetcher(Numbers())  # type: ignore[arg-type]
    prefetcher.batch(7, 0, 2, 8)
    assert prefetcher.batch(7, 40, 2, 8).inputs.tolist() == [40, 41]
    assert prefetcher.batch(8, 48, 2, 8).inputs.tolist() == [48, 49]


def test_an_error_of_reading_comes_with_the_step_that_needs_the_batch() -> None:
    prefetcher = BatchPrefetcher(Numbers(bad=8))  # type: ignore[arg-type]
    assert prefetcher.batch(7, 0, 2, 8).inputs.tolist() == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        prefetcher.batch(7, 8, 2, 8)
