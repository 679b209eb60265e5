"""The format of a segment: shared memory (a memfd) with one rank's part of the training state. This module imports no
torch, because agents read segments too.

A segment consists of:

- the header, in the first page: magic, version, which rank of which plan, where the other parts are, a CRC;
- the control block, in the second page: which step the state has, how far an update is, and two step records, of the
  steps with an even and with an odd number;
- the index: JSON with name, dtype, shapes and offset of each tensor, and the settings of the optimizer;
- four regions of equal layout: parameters, first moments, second moments, gradients of the step under way;
- the undo area: the bytes that the bucket under way had before its update;
- slots, appended when they are needed: one for each step record, with what reducers keep after that step.

Words of the control block are written as 8 aligned bytes, by one store, so a process that is killed leaves either the
old or the new word.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, ValidationError

from hpctrain.base.errors import CheckpointError
from hpctrain.records.format.document import Part
from hpctrain.records.history.manifest import LossScale
from hpctrain.records.history.memory_state import HeldState, StateKind

MAGIC = b"hpctrain"
VERSION = 1
PAGE = 4096
CONTROL = PAGE
"""Offset of the control block."""
INDEX = 2 * PAGE
"""Offset of the index."""
INDEX_MAX_BYTES = 1 << 28
REGIONS = ("model", "exp_avg", "exp_avg_sq", "gradient")
"""Names of the regions, in their order; the first three are prefixes of names in a checkpoint."""
ALIGNMENT = 64
"""Alignment in bytes of each tensor, a cache line."""

BUCKET_BYTES = 1 << 20
"""Bytes of parameters in one bucket of an update: with its moments, gradients and undo area it fits into the cache of a
core."""
UNDO_BYTES = 3 * BUCKET_BYTES
"""Bytes of the undo area: a bucket's parameters and moments."""

_HEADER = struct.Struct("<8sIIQ32sQQQQQI")
_CRC = struct.Struct("<I")
_WORD = struct.Struct("<Q")
_RECORD = struct.Struct("<QQQ")
_VERDICT = struct.Struct("<ddQdQQ")
_STATE, _GRADIENTS, _NORM, _CURSOR = range(4)
_RECORDS = CONTROL + 1024
_RECORD_BYTES = 128
_VERDICT_OFFSET = 64


class SegmentError(CheckpointError):
    """A segment that cannot be used; the message says why."""


class IndexEntry(Part):
    """One parameter in a segment; its moments and its gradient have the same place in their regions."""

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    """Name of the parameter in the model; its name in a checkpoint is 'model.' and this name."""
    dtype: Annotated[str, Field(pattern="^[a-z0-9_]{1,32}$")]
    """torch's name of the dtype, as 'float32'."""
    item_bytes: Annotated[int, Field(ge=1, le=16)]
    """Bytes of one number."""
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 62)]], Field(max_length=64)]
    """Shape of the whole parameter."""
    chunk_offsets: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 62)]], Field(max_length=64)]
    """Where this rank's part begins in the whole parameter, along each dimension."""
    chunk_shape: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 62)]], Field(max_length=64)]
    """Shape of this rank's part."""
    offset: Annotated[int, Field(ge=0, lt=1 << 62)]
    """Where the part begins within a region, in bytes."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @property
    def numel(self) -> int:
        """Return how many numbers this rank's part has."""
        count = 1
        for size in self.chunk_shape:
            count *= size
        return count

    @property
    def size_bytes(self) -> int:
        """Return the bytes of this rank's part."""
        return self.numel * self.item_bytes


class AdamSettings(Part):
    """The settings of AdamW that do not change during a run."""

    betas: tuple[float, float] = Field(strict=False)
    eps: float
    fused: bool
    """Whether torch's fused kernel makes the update; another kernel rounds in another way."""
    clip_norm: float | None = None
    """Norm to which gradients are clipped; None: they are not."""


class SegmentIndex(Part):
    """The index of a segment: which tensors are in it and where, and the settings of its optimizer."""

    optimizer: AdamSettings
    bucket_bytes: Annotated[int, Field(ge=1 << 14, lt=1 << 40)]
    """Most bytes of parameters that one bucket of an update has."""
    entries: Annotated[list[IndexEntry], Field(max_length=1 << 20)]
    """The parameters, in the order of their offsets."""


@dataclass(frozen=True)
class SegmentHeader:
    """The header of a segment of `rank` of the plan with hash `plan_sha256`. Offsets are in bytes."""

    STRUCT: ClassVar[struct.Struct] = _HEADER

    generation: int
    """Generation in which the segment was filled."""
    rank: int
    plan_sha256: str
    index_bytes: int
    region_bytes: int
    """Bytes of each region."""
    regions: int
    """Offset of the first region."""
    undo_bytes: int
    """Bytes of the undo area."""
    slots: int
    """Offset of the end of the fixed parts, where slots begin."""
    index_crc: int

    def region(self, name: str) -> int:
        """Return the offset of a region."""
        return self.regions + REGIONS.index(name) * self.region_bytes

    @property
    def undo(self) -> int:
        """Return the offset of the undo area."""
        return self.regions + len(REGIONS) * self.region_bytes


@dataclass(frozen=True)
class StepVerdict:
    """What the update of a step needs beside gradients, equal on all ranks."""

    norm: float
    """Norm of the whole model's gradient before clipping."""
    lr: float
    """Learning rate of the step."""
    loss_scale: LossScale | None
    """The loss scale after the step; None without one."""


@dataclass(frozen=True)
class SegmentState:
    """The words of the control block, read at one moment."""

    step: int | None
    """Steps that are complete; None if the segment holds no state."""
    gradients_step: int
    """Step whose gradients are complete."""
    norm_step: int
    """Newest step whose verdict is known."""
    cursor: int
    """Twice the number of buckets that this step has updated, plus 1 while it updates the next one."""

    @property
    def finishable(self) -> bool:
        """Whether the gradients of the next step are complete."""
        return self.step is not None and self.gradients_step == self.step + 1


def layout_header(generation: int, rank: int, plan_sha256: str, index: bytes, region_bytes: int, undo_bytes: int) -> (
    SegmentHeader
):  # fmt: skip
    """Return the header of a new segment, with the offsets of its parts. Both numbers of bytes are rounded up to whole
    pages.

    Args:
        index: the index as JSON.
        region_bytes: bytes of each region.
        undo_bytes: bytes of the undo area.
    """
    regions = _pages(INDEX + len(index))
    region_bytes, undo_bytes = _pages(region_bytes), _pages(undo_bytes)
    end = regions + len(REGIONS) * region_bytes + undo_bytes
    return SegmentHeader(
        generation, rank, plan_sha256, len(index), region_bytes, regions, undo_bytes, end, zlib.crc32(index)
    )


def create(descriptor: int, header: SegmentHeader, index: bytes) -> None:
    """Give a memfd the size of a segment, and write header and index. The segment holds no state yet.

    Raises:
        OSError: there is no memory for the segment.
    """
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, header.slots)
    packed = _HEADER.pack(
        MAGIC, VERSION, header.rank, header.generation, bytes.fromhex(header.plan_sha256), header.index_bytes,
        header.region_bytes, header.regions, header.undo_bytes, header.slots, header.index_crc,
    )  # fmt: skip
    os.pwrite(descriptor, index, INDEX)
    os.pwrite(descriptor, packed + _CRC.pack(zlib.crc32(packed)), 0)


def encode_index(index: SegmentIndex) -> bytes:
    """Return the index as JSON."""
    return index.model_dump_json().encode()


def read_header(descriptor: int) -> SegmentHeader:
    """Return the header of the segment in the memory behind a descriptor, checked against the memory's size.

    Raises:
        SegmentError: the memory holds no segment, one of another format version, or one whose header is damaged.
    """
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, _HEADER.size + _CRC.size, 0)
    if len(data) < _HEADER.size + _CRC.size or not data.startswith(MAGIC):
        raise SegmentError("the memory holds no state of a rank")
    packed = data[: _HEADER.size]
    if _CRC.unpack(data[_HEADER.size :])[0] != zlib.crc32(packed):
        raise SegmentError("the header of a rank's state in memory is damaged")
    _, version, rank, generation, plan, index_bytes, region_bytes, regions, undo, slots, crc = _HEADER.unpack(packed)
    if version != VERSION:
        raise SegmentError(f"a rank's state in memory has format {version}, this program reads {VERSION}")
    header = SegmentHeader(generation, rank, plan.hex(), index_bytes, region_bytes, regions, undo, slots, crc)
    end = regions + len(REGIONS) * region_bytes + undo
    if index_bytes > INDEX_MAX_BYTES or INDEX + index_bytes > regions or end != slots or slots > size:
        raise SegmentError("the header of a rank's state in memory does not fit its size")
    return header


def read_index(descriptor: int, header: SegmentHeader) -> SegmentIndex:
    """Return the index of a segment. Every tensor in it lies within the regions, and no two overlap.

    Raises:
        SegmentError: the index is damaged.
    """
    data = os.pread(descriptor, header.index_bytes, INDEX)
    if zlib.crc32(data) != header.index_crc:
        raise SegmentError("the index of a rank's state in memory is damaged")
    try:
        index = SegmentIndex.model_validate(json.loads(data))
    except (ValidationError, ValueError, RecursionError):
        raise SegmentError("the index of a rank's state in memory cannot be read") from None
    end = 0
    for entry in index.entries:
        if not len(entry.shape) == len(entry.chunk_offsets) == len(entry.chunk_shape):
            raise SegmentError(f"the index of a rank's state in memory gives {entry.name[:200]!r} two shapes")
        if entry.offset < end or entry.offset % ALIGNMENT:
            raise SegmentError(f"the index of a rank's state in memory puts {entry.name[:200]!r} at a wrong place")
        end = entry.offset + entry.size_bytes
        if end > header.region_bytes:
            raise SegmentError(f"the index of a rank's state in memory puts {entry.name[:200]!r} behind its end")
    return index


def read_state(descriptor: int) -> SegmentState:
    """Return how far the state in a segment is. `read_header` must have accepted the segment."""
    words = [_WORD.unpack(os.pread(descriptor, 8, CONTROL + 8 * place))[0] for place in range(4)]
    state = words[_STATE]
    return SegmentState(state - 1 if state else None, words[_GRADIENTS], words[_NORM], words[_CURSOR])


def read_verdict(descriptor: int, step: int) -> StepVerdict | None:
    """Return the verdict of a step; None if the segment does not have it.

    Raises:
        SegmentError: the verdict is damaged.
    """
    place = _RECORDS + step % 2 * _RECORD_BYTES
    (known,) = _WORD.unpack(os.pread(descriptor, 8, place))
    if known != step or read_state(descriptor).norm_step < step:
        return None
    data = os.pread(descriptor, _VERDICT.size, place + _VERDICT_OFFSET)
    norm, lr, scaled, value, good, skipped = _VERDICT.unpack(data)
    try:
        loss_scale = LossScale(value=value, good_steps=good, skipped=skipped) if scaled else None
    except ValidationError:
        raise SegmentError("the loss scale of a rank's state in memory is damaged") from None
    return StepVerdict(norm, lr, loss_scale)


def read_record(descriptor: int, parity: int) -> tuple[int, int, int]:
    """Return the step of the record of even (0) or odd (1) steps, and offset and bytes of its slot; 0 bytes: it has
    none.

    Raises:
        SegmentError: the slot lies outside of the segment.
    """
    step, offset, size = _RECORD.unpack(os.pread(descriptor, _RECORD.size, _RECORDS + parity * _RECORD_BYTES))
    if offset + size > os.fstat(descriptor).st_size:
        raise SegmentError("what reducers keep lies outside of a rank's state in memory")
    return step, offset, size


def held_state(descriptor: int, kind: StateKind = "live") -> HeldState | None:
    """Return what a segment holds, for an agent; None if it has no state or is damaged. No worker may be writing."""
    try:
        header, state = read_header(descriptor), read_state(descriptor)
        if state.step is None:
            return None
        return HeldState(
            generation=header.generation, plan_sha256=header.plan_sha256, rank=header.rank, kind=kind, step=state.step,
            finishable=state.finishable, norm_step=state.norm_step, size_bytes=os.fstat(descriptor).st_size,
        )  # fmt: skip
    except (SegmentError, OSError, ValidationError):
        return None


class Control:
    """Writes the control block of a mapped segment."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._words = memoryview(memory)[CONTROL : CONTROL + 32].cast("Q")
        self._memory = memory

    def set_state(self, step: int | None) -> None:
        """Say that the state of `step` is complete; None: the segment holds no state."""
        self._words[_STATE] = 0 if step is None else step + 1

    def set_gradients(self, step: int) -> None:
        """Say that the gradients of `step` are complete."""
        self._words[_GRADIENTS] = step

    def set_norm(self, step: int) -> None:
        """Say that the verdict of `step` is known, so that its update may begin."""
        self._words[_NORM] = step

    def set_cursor(self, cursor: int) -> None:
        """Write `SegmentState.cursor`, which says how far the update is."""
        self._words[_CURSOR] = cursor

    def write_slot(self, step: int, slot: tuple[int, int] = (0, 0)) -> None:
        """Begin the record of a step with offset and bytes of its slot; (0, 0): reducers keep nothing."""
        self._write(step, 0, _RECORD.pack(step, *slot))

    def write_verdict(self, step: int, verdict: StepVerdict) -> None:
        """Write the verdict of a step, whose record has begun; `set_norm` comes after it."""
        scale = verdict.loss_scale or LossScale()
        scaled = verdict.loss_scale is not None
        packed = _VERDICT.pack(verdict.norm, verdict.lr, scaled, scale.value, scale.good_steps, scale.skipped)
        self._write(step, _VERDICT_OFFSET, packed)

    def _write(self, step: int, offset: int, packed: bytes) -> None:
        place = _RECORDS + step % 2 * _RECORD_BYTES + offset
        self._memory[place : place + len(packed)] = packed

    def close(self) -> None:
        """Let go of the memory, so that its mapping can be closed."""
        self._words.release()


def read_slot_index(descriptor: int, slot: tuple[int, int]) -> tuple[dict[str, tuple[str, list[int], int, int]], int]:
    """Return name -> (dtype, shape, offset, bytes) of the tensors of a slot (offset, bytes), and where in the segment
    their offsets begin: at the end of the slot's index, rounded up to `ALIGNMENT`.

    Raises:
        SegmentError: the slot is damaged.
    """
    offset, size = slot
    (length,) = _WORD.unpack(os.pread(descriptor, 8, offset).ljust(8, b"\0"))
    if not 0 < length <= min(size, INDEX_MAX_BYTES):
        raise SegmentError("what reducers keep in memory is damaged")
    try:
        content = json.loads(os.pread(descriptor, length, offset + 8))
        tensors = {
            str(name): (str(dtype), [int(number) for number in shape], int(place), int(count))
            for name, (dtype, shape, place, count) in content.items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise SegmentError("what reducers keep in memory is damaged") from None
    start = aligned(offset + 8 + length)
    if any(place < 0 or count < 0 or start + place + count > offset + size for _, _, place, count in tensors.values()):
        raise SegmentError("what reducers keep in memory is damaged")
    return tensors, start


def aligned(count: int) -> int:
    """Return `count` rounded up to a multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _pages(count: int) -> int:
    return -(-count // PAGE) * PAGE
