"""Snapshots of a rank's state every few steps: two on its own node, taken in turn, and, if no other node holds the same
part of the state, two on a neighbour's node. So all parts of one step are still there when any one node is lost.

A thread copies the state while the next step computes its gradients, and sends the snapshot to the neighbour. A
snapshot holds no step until all of its bytes are there. The last one stays until every rank has the next one.
"""

from __future__ import annotations

import math
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.checkpoint.memory.mapping import MappedSegment
from hpctrain.checkpoint.memory.segment import (
    CONTROL,
    INDEX,
    PAGE,
    SegmentError,
    StepVerdict,
    read_state,
    read_verdict,
)

SHARE = 0.03
"""Largest share of the time of training in which snapshots are made, with `recovery.snapshot_every: auto`."""
SEND_BYTES = 1 << 28
"""Most bytes of one message to a neighbour."""
_CHECKSUM = struct.Struct("<QI")
_CHECKSUM_OFFSET = CONTROL + 512
Pair = Sequence[int]
"""Descriptors of the two memories in which the snapshots of a rank lie in turn."""


@dataclass(frozen=True)
class _Layout:
    """Where the parts of a rank's segment are."""

    head: bytes
    """Header, control block and index."""
    size: int
    """Bytes of the segment, without slots."""
    ranks: int
    """How many ranks the plan has."""

    def prepare(self, pair: Pair) -> tuple[MappedSegment, MappedSegment]:
        """Map the memory for two snapshots, and return both. Snapshots of the same rank, plan and generation that lie
        there already stay. Gradients and undo area of a snapshot are never written, and so take no memory."""
        for descriptor in pair:
            if os.pread(descriptor, PAGE, 0) != self.head[:PAGE]:
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, self.size)
                os.pwrite(descriptor, self.head[INDEX:], INDEX)
                os.pwrite(descriptor, self.head[:PAGE], 0)
        first, second = (MappedSegment(descriptor, self.ranks) for descriptor in pair)
        return first, second


@dataclass(frozen=True)
class StepNotes:
    """What a snapshot has beside parameters and moments."""

    verdict: StepVerdict
    reducer_state: dict[str, Tensor]
    """What reducers keep after the step; the next step changes it."""
    row: bytes
    """The step's row of metrics.jsonl; empty: it is not known."""


class SnapshotSource(Protocol):
    """The state of a rank, of which snapshots are made."""

    head: bytes
    """Header, control block and index of a segment with this state."""
    size: int
    """Bytes of this segment, without slots."""
    ranks: int
    """How many ranks the plan has."""

    def prepare(self, snapshots: Sequence[MappedSegment]) -> None:
        """Make copies into these snapshots fast."""

    def begin(self, snapshot: MappedSegment, step: int, notes: StepNotes) -> None:
        """Copy at once what the next step may change at any time."""

    def copy(self, snapshot: MappedSegment, step: int) -> None:
        """Copy what only the update of the next step changes: parameters and moments, at least. Another thread calls
        this."""


class LiveSource:
    """The state that a worker trains on in its segment."""

    def __init__(self, live: MappedSegment, ranks: int) -> None:
        self._live = live
        self.head = os.pread(live.descriptor, INDEX + live.header.index_bytes, 0)
        self.size, self.ranks = live.header.slots, ranks

    def prepare(self, snapshots: Sequence[MappedSegment]) -> None:
        pass

    def begin(self, snapshot: MappedSegment, step: int, notes: StepNotes) -> None:
        pass  # the segment has the notes, and those of the next step lie beside them

    def copy(self, snapshot: MappedSegment, step: int) -> None:
        snapshot.state_bytes().copy_(self._live.state_bytes())
        slot = self._live.slot_bytes(step)
        snapshot.new_slot(step, slot.numel()).copy_(slot)
        verdict = read_verdict(self._live.descriptor, step)
        if verdict is None:
            raise SegmentError(f"the state in memory has no verdict of step {step}")
        snapshot.control.write_verdict(step, verdict)


class SnapshotRing:
    """The snapshots that this rank makes, and those of its neighbours that it receives."""

    def __init__(
        self, source: SnapshotSource, own: Pair, guests: Mapping[int, Pair], every: int | None, group: dist.ProcessGroup
    ) -> None:
        """Prepare the memory for the snapshots. Collective over all ranks.

        Args:
            source: the state of this rank.
            own: memory for this rank's snapshots.
            guests: other rank -> memory for its snapshots.
            every: steps between two snapshots; None: as many as `SHARE` allows.
            group: all ranks; no other thread uses it.
        """
        self._source = source
        self._group = group
        self._given = every
        layout = _Layout(source.head, source.size, source.ranks)
        everyone: list[tuple[_Layout, list[int]]] = [(layout, [])] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (layout, sorted(guests)), group=group)
        rank = dist.get_rank(group)
        self._hosts = [host for host, (_, hosted) in enumerate(everyone) if rank in hosted]
        self._own = layout.prepare(own)
        source.prepare(self._own)
        self._guests = {guest: everyone[guest][0].prepare(pair) for guest, pair in sorted(guests.items())}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._pending: Future[None] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._begun: int | None = None
        self._seconds = 0.0
        self._step_s = 0.0

    def complete(self, step: int) -> int:
        """Return the step of this rank's newest snapshot if it is complete, here and on the neighbour's node; -1 while
        it is being made, or before the first. If the interval is given (`every` of the constructor) and the next
        snapshot is due after this step, wait until the newest is complete.

        Args:
            step: the step under way.

        Raises:
            Exception: the newest snapshot could not be copied or sent.
        """
        if self._begun is None or self._pending is None:
            return -1
        if not self._pending.done() and (self._given is None or step < self._begun + self._given):
            return -1
        with ACTIVITY.doing("wait for the snapshot of the state", waits="world"):
            self._pending.result()
        return self._begun

    def interval(self) -> int:
        """Return how many steps are to lie between two snapshots: as given, else by this rank's own times."""
        if self._given is not None:
            return self._given
        return max(1, math.ceil(self._seconds / (SHARE * self._step_s))) if self._step_s else 1

    def begin_if_due(self, step: int, step_s: float, complete: int, every: int, notes: Callable[[], StepNotes]) -> None:
        """Begin a snapshot of the present step, if the last one is complete on every rank and long enough ago.

        Args:
            step: the present step.
            step_s: seconds that it took.
            complete: the smallest `complete` of all ranks.
            every: the largest `interval` of all ranks.
            notes: returns the notes of the step.
        """
        self._step_s = 0.9 * self._step_s + 0.1 * step_s if self._step_s else step_s
        if self._begun is not None and (complete != self._begun or step < self._begun + every):
            return
        self._begun = step
        self._copied.clear()
        own = _older(self._own)
        own.control.set_state(None)
        self._source.begin(own, step, notes())
        self._pending = self._thread.submit(self._snapshot, step, own)

    def wait_copied(self) -> None:
        """Wait until a snapshot that is being made has copied the state, so that the state may change."""
        self._copied.wait()

    def close(self) -> None:
        """Wait for a snapshot that is being made, and end the thread."""
        self._thread.shutdown(wait=True)

    def _snapshot(self, step: int, own: MappedSegment) -> None:
        start = time.perf_counter()
        try:
            self._source.copy(own, step)
        finally:
            self._copied.set()
        _write_checksum(own, step)
        own.control.set_norm(step)
        own.control.set_state(step)
        self._exchange(step, own)
        self._seconds = time.perf_counter() - start

    def _exchange(self, step: int, own: MappedSegment) -> None:
        """Send a snapshot to the neighbour, and receive those of others."""
        works: list[dist.Work | None] = []
        size = own.slot_bytes(step).numel().to_bytes(8, "little")
        control = torch.frombuffer(bytearray(os.pread(own.descriptor, PAGE, CONTROL) + size), dtype=torch.uint8)
        for host in self._hosts:
            for part in (control, *_parts(own, step)):
                works.append(dist.isend(part, dist.get_global_rank(self._group, host), group=self._group))
        guests = [(dist.get_global_rank(self._group, rank), _older(pair)) for rank, pair in self._guests.items()]
        for sender, guest in guests:
            guest.control.set_state(None)
            dist.recv(control := torch.empty(PAGE + 8, dtype=torch.uint8), sender, group=self._group)
            page = control.numpy().tobytes()
            # All but the words, which say that the snapshot is complete.
            guest.memory[CONTROL + 64 : CONTROL + PAGE] = page[64:PAGE]
            guest.new_slot(step, int.from_bytes(page[PAGE:], "little"))
            works += [dist.irecv(part, sender, group=self._group) for part in _parts(guest, step)]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()
        for _, guest in guests:
            guest.control.set_norm(step)
            guest.control.set_state(step)


def check_snapshot(segment: MappedSegment) -> None:
    """Compare a snapshot with its checksum. A segment on which a worker trained has none, and passes.

    Raises:
        SegmentError: the bytes are not those that were copied.
    """
    step, crc = _CHECKSUM.unpack(os.pread(segment.descriptor, _CHECKSUM.size, _CHECKSUM_OFFSET))
    if step and (read_state(segment.descriptor).step != step or _checksum(segment, step) != crc):
        raise SegmentError(f"the snapshot of the state of rank {segment.header.rank} in memory is damaged")


def _write_checksum(segment: MappedSegment, step: int) -> None:
    packed = _CHECKSUM.pack(step, _checksum(segment, step))
    segment.memory[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + len(packed)] = packed


def _checksum(segment: MappedSegment, step: int) -> int:
    state, slot = (part.numpy().data for part in (segment.state_bytes(), segment.slot_bytes(step)))
    return zlib.crc32(slot, zlib.crc32(state))


def _parts(segment: MappedSegment, step: int) -> list[Tensor]:
    """Return the messages with the state and the slot of a snapshot, which share its memory."""
    return [*segment.state_bytes().split(SEND_BYTES), *filter(torch.numel, segment.slot_bytes(step).split(SEND_BYTES))]


def _older(pair: Sequence[MappedSegment]) -> MappedSegment:
    """Return the one of two snapshots that is written next."""
    steps = [read_state(segment.descriptor).step for segment in pair]
    return pair[0] if steps[0] is None or (steps[1] is not None and steps[0] < steps[1]) else pair[1]
