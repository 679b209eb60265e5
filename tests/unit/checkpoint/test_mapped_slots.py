"""What reducers keep between steps, and rows of metrics, in a segment that many processes use one after another."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.memory.live_state import LiveState, SegmentOwner
from hpctrain.checkpoint.memory.mapping import MappedSegment
from hpctrain.checkpoint.memory.segment import PAGE, StepVerdict
from hpctrain.checkpoint.state import prepare_moments

STEPS = 3
"""Odd, so that generations begin with even and with odd steps."""


@pytest.fixture
def segment() -> Iterator[int]:
    named = list(nn.Linear(8, 8).named_parameters())
    optimizer = torch.optim.AdamW([parameter for _, parameter in named], fused=True)
    prepare_moments(named, optimizer)
    descriptor = os.memfd_create("segment")
    LiveState.fill(descriptor, SegmentOwner(0, 0, "a" * 64), named, optimizer, None, {}).commit(0, None, {})
    yield descriptor
    os.close(descriptor)


def generation(descriptor: int, step: int, residual: int, row_bytes: list[int]) -> None:
    """Three steps of a process that continues on the segment after `step`."""
    live = LiveState(MappedSegment(descriptor))
    for ahead, size in enumerate(row_bytes, 1):
        gradients = [torch.ones(8, 8), torch.ones(8)]
        kept = {"residual": torch.full((residual,), float(step + ahead))}
        live.keep_gradients(step + ahead, gradients, kept, b"r" * size)
        live.update(step + ahead, StepVerdict(1.0, 1e-3, None), gradients)


@pytest.mark.parametrize("residual", [0, 5000])
def test_a_segment_does_not_grow_with_the_generations_that_use_it(segment: int, residual: int) -> None:
    sizes = []
    for number in range(6):
        # Rows are not of one length, and may need another page.
        rows = [[PAGE - 100, 10, PAGE + 100], [10, 10, 10], [PAGE + 500, 500, PAGE]][number % 3]
        generation(segment, STEPS * number, residual, rows)
        sizes.append(os.fstat(segment).st_size)
    assert len(set(sizes)) == 1


def test_both_slots_are_whole_after_each_generation(segment: int) -> None:
    for number in range(4):
        generation(segment, STEPS * number, 3000, [100, 2 * PAGE, 50])
        mapped, last = MappedSegment(segment), STEPS * (number + 1)
        for step, size in ((last - 1, 2 * PAGE), (last, 50)):
            assert torch.equal(mapped.read_slot(step)[0]["residual"], torch.full((3000,), float(step)))
            assert mapped.read_row(step) == b"r" * size


def test_what_reducers_kept_is_read_with_the_count_of_ranks(segment: int) -> None:
    live = LiveState(MappedSegment(segment, ranks=3))
    live.keep_gradients(1, [torch.ones(8, 8), torch.ones(8)], {"residual": torch.ones(4)}, b"row")
    state, ranks = MappedSegment(segment, ranks=2).read_slot(1)
    assert ({name: part.tolist() for name, part in state.items()}, ranks) == ({"residual": [1.0] * 4}, 3)
    assert MappedSegment(segment).read_row(1) == b"row"
    live.keep_gradients(2, [torch.ones(8, 8), torch.ones(8)], {}, b"row")
    assert MappedSegment(segment).read_slot(2) == ({}, 0)


def test_a_slot_that_outgrows_its_room_leaves_the_other_one_whole(segment: int) -> None:
    generation(segment, 0, 1000, [10, 10, 10])
    generation(segment, STEPS, 100_000, [10])
    assert MappedSegment(segment).read_slot(STEPS)[0]["residual"].tolist() == [3.0] * 1000
    assert MappedSegment(segment).read_slot(STEPS + 1)[0]["residual"].tolist() == [4.0] * 100_000
