"""A segment in the memory of a process that computes with it."""

from __future__ import annotations

import json
import mmap
import os

import torch
from torch import Tensor

from hpctrain.checkpoint.memory.segment import (
    ALIGNMENT,
    PAGE,
    REGIONS,
    Control,
    SegmentError,
    SegmentHeader,
    SegmentIndex,
    aligned,
    read_header,
    read_index,
    read_record,
    read_slot_index,
)

_BITS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _BITS}
"""Name of a dtype in an index -> dtype. Parameters have one of these."""
_ROW = "row of metrics"
"""Name of the row of metrics.jsonl among the tensors of a slot."""
_RANKS = "ranks"
"""Name of the count of ranks among the tensors of a slot."""
_SPARE_BYTES = 1 << 16
"""Bytes after a new slot, for longer rows of metrics.jsonl. Bytes that nobody has written take no memory."""


class MappedSegment:
    """A segment whose bytes are tensors of this process. Every process that maps the same memory sees changes."""

    def __init__(self, descriptor: int, ranks: int = 0) -> None:
        """Map a segment.

        Args:
            descriptor: of the memory; this object does not close it.
            ranks: how many ranks this process's plan has, which is written to slots.

        Raises:
            SegmentError: the memory holds no segment that this program can use.
            OSError: the memory cannot be mapped.
        """
        self.descriptor = descriptor
        self._ranks = ranks
        self.header: SegmentHeader = read_header(descriptor)
        self.index: SegmentIndex = read_index(descriptor, self.header)
        for entry in self.index.entries:
            if entry.dtype not in DTYPES or DTYPES[entry.dtype].itemsize != entry.item_bytes:
                raise SegmentError(f"a rank's state in memory has {entry.name[:200]!r} as {entry.dtype}")
        self.memory = mmap.mmap(descriptor, self.header.slots)
        self.control = Control(self.memory)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._slots: dict[int, tuple[int, Tensor]] = {}
        """Parity of a step -> offset and bytes of the memory for its slot."""
        # A slot whose step is over is written again. The room of a slot ends where the other one's begins.
        slots = [read_record(descriptor, parity)[1:] for parity in (0, 1)]
        ends = [*(offset for offset, size in slots if size), os.fstat(descriptor).st_size]
        for parity, (offset, size) in enumerate(slots):
            if size:
                self._map_slot(parity, offset, min(end for end in ends if end > offset) - offset)

    def flat(self, region: str, padding: bool = False) -> list[Tensor]:
        """Return each parameter's part of a region as a flat tensor, in the order of the index. The tensors share the
        segment's memory.

        Args:
            padding: whether each tensor includes the padding up to the next parameter.
        """
        start, entries = self.header.region(region), self.index.entries
        ends = [entry.offset for entry in entries[1:]] + [self.header.region_bytes]
        tensors = []
        for entry, end in zip(entries, ends, strict=True):
            first = start + entry.offset
            last = start + end if padding else first + entry.size_bytes
            tensors.append(self._bytes[first:last].view(DTYPES[entry.dtype]))
        return tensors

    def tensors(self) -> dict[str, Tensor]:
        """Return name in a checkpoint -> this rank's part of the tensor, for parameters and moments."""
        return {
            f"{region}.{entry.name}": flat.view(entry.chunk_shape)
            for region in REGIONS[:3]
            for entry, flat in zip(self.index.entries, self.flat(region), strict=True)
        }

    def state_bytes(self) -> Tensor:
        """Return the bytes of parameters and moments, which share the segment's memory."""
        return self._bytes[self.header.regions : self.header.regions + len(REGIONS[:3]) * self.header.region_bytes]

    def remember(self, start: int, end: int) -> None:
        """Copy the bytes from `start` to below `end` of each region of parameters and moments to the undo area."""
        for target, source in self._undo_pairs(start, end):
            target.copy_(source)

    def undo(self, start: int, end: int) -> None:
        """Write the bytes that `remember` saved in the undo area back to their places."""
        for target, source in self._undo_pairs(start, end):
            source.copy_(target)

    def _undo_pairs(self, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        count, undo = end - start, self.header.undo
        room = self.header.undo_bytes // len(REGIONS[:3]) // ALIGNMENT * ALIGNMENT
        pairs = []
        for number, region in enumerate(REGIONS[:3]):
            place, first = undo + number * room, self.header.region(region) + start
            pairs.append((self._bytes[place : place + count], self._bytes[first : first + count]))
        return pairs

    def write_slot(self, step: int, tensors: dict[str, Tensor], row: bytes = b"") -> None:
        """Copy what reducers keep after a step, and the step's row of metrics.jsonl, into the step's slot, and begin
        the step's record. The slot of the step before stays.

        Raises:
            OSError: there is no memory for the slot.
        """
        if tensors:
            tensors = tensors | {_RANKS: torch.tensor(self._ranks)}
        if row:
            tensors = tensors | {_ROW: torch.frombuffer(bytearray(row), dtype=torch.uint8)}
        if not tensors:
            self.control.write_slot(step)
            return
        described, end = {}, 0
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            described[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end, size)
            end = aligned(end + size)
        text = json.dumps(described).encode()
        head = len(text).to_bytes(8, "little") + text
        start = aligned(len(head))
        offset, room = self._room(step % 2, start + end)
        room[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for tensor, (_, _, place, size) in zip(tensors.values(), described.values(), strict=True):
            if size:
                raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
                room[start + place : start + place + size].copy_(raw)
        self.control.write_slot(step, (offset, start + end))

    def slot_bytes(self, step: int) -> Tensor:
        """Return the bytes of the slot of a step, which share the segment's memory; empty without one.

        Raises:
            SegmentError: the slot lies outside of the segment.
        """
        known, offset, count = read_record(self.descriptor, step % 2)
        for start, room in self._slots.values():
            if known == step and start == offset and count <= room.numel():
                return room[:count]
        return self._bytes[:0]

    def new_slot(self, step: int, count: int) -> Tensor:
        """Begin the record of a step, and return the memory for its slot of `count` bytes. This is for a snapshot,
        which has the slot of one step only.

        Raises:
            OSError: there is no memory for the slot.
        """
        self.control.write_slot(step + 1)
        if not count:
            self.control.write_slot(step)
            return self._bytes[:0]
        offset, room = self._room(next(iter(self._slots), step % 2), count)
        self.control.write_slot(step, (offset, count))
        return room[:count]

    def _room(self, parity: int, size: int) -> tuple[int, Tensor]:
        """Return the offset and the memory of a slot with at least `size` bytes; the segment grows if the present slot
        of this parity is too small."""
        if parity not in self._slots or self._slots[parity][1].numel() < size:
            offset = -(-os.fstat(self.descriptor).st_size // PAGE) * PAGE
            room = -(-(size + _SPARE_BYTES) // PAGE) * PAGE
            os.ftruncate(self.descriptor, offset + room)
            self._map_slot(parity, offset, room)
        return self._slots[parity]

    def _map_slot(self, parity: int, offset: int, size: int) -> None:
        if offset % PAGE or offset < self.header.slots:
            raise SegmentError("what reducers keep in memory is at a wrong place")
        memory = mmap.mmap(self.descriptor, size, offset=offset)
        self._slots[parity] = offset, torch.frombuffer(memory, dtype=torch.uint8)

    def read_row(self, step: int) -> bytes | None:
        """Return the row of metrics.jsonl of a step as far as it was known before the update; None if there is none.

        Raises:
            SegmentError: the slot is damaged.
        """
        row = self._read_slot(step).get(_ROW)
        return bytes(row.view(torch.uint8).tolist()) if row is not None else None

    def read_slot(self, step: int) -> tuple[dict[str, Tensor], int]:
        """Return copies of what reducers kept after a step, by name, and the number of ranks of the plan that then
        ran; ({}, 0) if they kept nothing.

        Raises:
            SegmentError: the slot is damaged.
        """
        state = self._read_slot(step)
        state.pop(_ROW, None)
        return state, int(state.pop(_RANKS, 0))

    def _read_slot(self, step: int) -> dict[str, Tensor]:
        known, offset, count = read_record(self.descriptor, step % 2)
        if known != step or not count:
            return {}
        described, start = read_slot_index(self.descriptor, (offset, count))
        tensors = {}
        for name, (dtype, shape, place, size) in described.items():
            raw = bytearray(os.pread(self.descriptor, size, start + place))
            kind = getattr(torch, dtype, None)
            try:
                if not isinstance(kind, torch.dtype):
                    raise ValueError(dtype)
                tensors[name] = (torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)).view(shape)
            except (ValueError, RuntimeError):
                raise SegmentError(f"what reducers keep in memory is damaged: {name[:200]!r}") from None
        return tensors
