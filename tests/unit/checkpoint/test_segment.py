"""Segments are read by processes that did not write them: whatever is in the memory, the reader says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.memory.segment import (
    CONTROL,
    INDEX,
    AdamSettings,
    IndexEntry,
    SegmentError,
    SegmentIndex,
    create,
    encode_index,
    held_state,
    layout_header,
    read_header,
    read_index,
    read_record,
    read_slot_index,
    read_state,
    read_verdict,
)

MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ADAM = AdamSettings(betas=(0.9, 0.95), eps=1e-8, fused=True, clip_norm=1.0)


def entry(name: str, offset: int, rows: int = 4) -> IndexEntry:
    return IndexEntry(
        name=name, dtype="float32", item_bytes=4, shape=[2 * rows, 8], chunk_offsets=[rows, 0], chunk_shape=[rows, 8],
        offset=offset, weight_decay=0.1,
    )  # fmt: skip


def made(*entries: IndexEntry) -> int:
    """A segment of these parameters, without a state."""
    index = encode_index(SegmentIndex(optimizer=ADAM, bucket_bytes=1 << 14, entries=list(entries)))
    descriptor = os.memfd_create("segment")
    create(descriptor, layout_header(3, 1, "ab" * 32, index, 4096, 3 << 14), index)
    return descriptor


@pytest.fixture
def segment() -> Iterator[int]:
    descriptor = made(entry("a", 0), entry("b", 128))
    yield descriptor
    os.close(descriptor)


def word(descriptor: int, place: int, value: int) -> None:
    os.pwrite(descriptor, value.to_bytes(8, "little"), CONTROL + 8 * place)


def test_what_was_written_is_read(segment: int) -> None:
    header = read_header(segment)
    assert (header.generation, header.rank, header.plan_sha256) == (3, 1, "ab" * 32)
    assert [item.name for item in read_index(segment, header).entries] == ["a", "b"]
    assert os.fstat(segment).st_size == header.slots


def test_a_new_segment_holds_no_state(segment: int) -> None:
    assert read_state(segment).step is None
    assert held_state(segment) is None


def test_an_agent_reads_which_step_is_held_and_whether_the_next_can_be_finished(segment: int) -> None:
    word(segment, 0, 8)
    word(segment, 1, 7)
    held = held_state(segment)
    assert held is not None
    assert (held.generation, held.rank, held.step, held.finishable) == (3, 1, 7, False)
    word(segment, 1, 8)
    held = held_state(segment)
    assert held is not None
    assert held.finishable


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ((entry("a", 0), entry("b", 64)), "'b' at a wrong place"),
        ((entry("a", 0), entry("b", 130)), "'b' at a wrong place"),
        ((entry("a", 0), entry("b", 128, rows=1000)), "'b' behind its end"),
        ((entry("a", 0).model_copy(update={"chunk_shape": [4]}),), "'a' two shapes"),
    ],
)
def test_an_index_that_cannot_be_is_refused(entries: tuple[IndexEntry, ...], words: str) -> None:
    descriptor = made(*entries)
    with pytest.raises(SegmentError, match=words):
        read_index(descriptor, read_header(descriptor))
    os.close(descriptor)


def test_other_memory_is_refused() -> None:
    descriptor = os.memfd_create("other")
    with pytest.raises(SegmentError, match="no state of a rank"):
        read_header(descriptor)
    assert held_state(descriptor) is None
    os.close(descriptor)


def test_a_segment_whose_end_is_missing_is_refused(segment: int) -> None:
    os.ftruncate(segment, 2 * 4096)
    with pytest.raises(SegmentError, match="does not fit its size"):
        read_header(segment)


@pytest.mark.slow
@MANY
@given(st.integers(0, INDEX + 700), st.binary(min_size=1, max_size=40))
def test_damage_anywhere_is_an_error_of_the_reader(place: int, damage: bytes) -> None:
    descriptor = made(entry("a", 0), entry("b", 128))
    word(descriptor, 0, 8)
    os.pwrite(descriptor, damage, place)
    try:
        held_state(descriptor)
        try:
            header = read_header(descriptor)
            index = read_index(descriptor, header)
            assert [item.name for item in index.entries] == ["a", "b"]
            for step in (6, 7, 8):
                read_verdict(descriptor, step)
                slot = read_record(descriptor, step % 2)[1:]
                if slot[1]:
                    tensors, start = read_slot_index(descriptor, slot)
                    assert all(start + at + size <= sum(slot) for _, _, at, size in tensors.values())
        except SegmentError:
            pass
    finally:
        os.close(descriptor)


@pytest.mark.slow
@MANY
@given(st.binary(max_size=300), st.integers(0, 400))
def test_a_slot_of_any_bytes_is_read_or_refused(content: bytes, size: int) -> None:
    descriptor = os.memfd_create("slot")
    os.pwrite(descriptor, content, 0)
    try:
        tensors, start = read_slot_index(descriptor, (0, size))
        assert all(start + at + count <= size for _, _, at, count in tensors.values())
    except SegmentError:
        pass
    finally:
        os.close(descriptor)


def test_agents_read_segments_without_torch() -> None:
    modules = "hpctrain.checkpoint.memory.segment, hpctrain.checkpoint.memory.choose"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
