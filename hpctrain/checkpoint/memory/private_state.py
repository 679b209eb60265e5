"""The state of a rank in its own memory, on a GPU or a CPU, as a source of snapshots: it ends with its process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.memory.live_state import Named, SegmentOwner, describe, local_tensor, region_end
from hpctrain.checkpoint.memory.mapping import MappedSegment
from hpctrain.checkpoint.memory.segment import BUCKET_BYTES, INDEX, create, encode_index, layout_header
from hpctrain.checkpoint.memory.snapshots import StepNotes
from hpctrain.checkpoint.state import MOMENTS


class PrivateState:
    """A `SnapshotSource`: this rank's parameters and moments, where model and optimizer have them."""

    def __init__(
        self,
        owner: SegmentOwner,
        parameters: Named,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        padded: Mapping[nn.Parameter, Tensor],
    ) -> None:
        """Describe the state; nothing is copied yet.

        Args:
            owner: whose state it is.
            parameters: names and parameters of this rank.
            optimizer: AdamW over these parameters, which has their moments already.
            clip_norm: norm to which gradients are clipped; None: they are not.
            padded: for parameters that torch shards: parameter -> flat memory, with padding, that begins with this
                rank's part.
        """
        index = describe(parameters, optimizer, clip_norm, padded, BUCKET_BYTES)
        encoded, end = encode_index(index), region_end(index, parameters, padded)
        header = layout_header(owner.generation, owner.rank, owner.plan_sha256, encoded, end, undo_bytes=0)
        with os.fdopen(os.memfd_create("head"), "rb") as file:
            create(file.fileno(), header, encoded)
            self.head = file.read(INDEX + header.index_bytes)
        self.size = header.slots
        self.ranks = owner.ranks
        self._parameters, self._optimizer = [parameter for _, parameter in parameters], optimizer
        self._copies = SideStream(local_tensor(self._parameters[0]).device)

    def prepare(self, snapshots: Sequence[MappedSegment]) -> None:
        for snapshot in snapshots:
            self._copies.page_lock(snapshot.state_bytes())

    def begin(self, snapshot: MappedSegment, step: int, notes: StepNotes) -> None:
        snapshot.write_slot(step, notes.reducer_state, notes.row)
        snapshot.control.write_verdict(step, notes.verdict)
        self._copies.mark()

    def copy(self, snapshot: MappedSegment, step: int) -> None:
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        parts: dict[str, list[Tensor]] = {"model": list(self._parameters)}
        parts |= {moment: [state[moment] for state in states] for moment in MOMENTS}
        self._copies.run(
            [
                (room.view(part.shape), part)
                for region, tensors in parts.items()
                for room, part in zip(snapshot.flat(region), map(local_tensor, tensors), strict=True)
            ]
        )


class SideStream:
    """Copies from a device to the host that run beside the work on the device's stream; from a CPU, plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._marked = torch.cuda.Event() if device.type == "cuda" else None

    def page_lock(self, memory: Tensor) -> None:
        """Page-lock host memory, until the process ends, so that copies into it do not hold up the device's stream. If
        the system refuses, copies take longer, and the worker's log says so."""
        if self._stream is not None and not memory.is_pinned():
            with torch.cuda.device(self._stream.device):
                error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            if int(error):
                print(f"hpctrain: snapshots are slow, their memory cannot be page-locked: error {error}", flush=True)

    def mark(self) -> None:
        """Let the next `run` begin after the work that is now on the device's stream."""
        if self._stream is not None and self._marked is not None:
            self._marked.record(torch.cuda.current_stream(self._stream.device))

    @torch.no_grad()
    def run(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the second tensor of each pair into the first, and wait until all copies are done."""
        if self._stream is None or self._marked is None:
            for target, source in pairs:
                target.copy_(source)
            return
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._marked)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(self._stream)
        done.synchronize()
