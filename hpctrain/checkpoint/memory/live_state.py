"""The state that a CPU worker trains on, in a segment that its agent owns: it outlives the worker.

The worker's parameters and moments are the bytes of the segment themselves. In each step the worker copies its reduced
gradients into the segment before any rank has the gradient's norm, and updates the state bucket after bucket. So a
worker that is killed leaves the state of a step, or one that can be finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.memory.mapping import DTYPES, MappedSegment
from hpctrain.checkpoint.memory.segment import (
    BUCKET_BYTES,
    AdamSettings,
    IndexEntry,
    SegmentError,
    SegmentIndex,
    StepVerdict,
    aligned,
    create,
    encode_index,
    layout_header,
)
from hpctrain.checkpoint.memory.update import BucketedUpdate, begin
from hpctrain.checkpoint.state import MOMENTS
from hpctrain.records.history.manifest import LossScale

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class SegmentOwner:
    """Whose state a segment holds."""

    generation: int
    rank: int
    plan_sha256: str
    """SHA-256 of the plan to which `rank` belongs, as hex."""
    ranks: int = 0
    """How many ranks the plan has."""


def dtypes_fit(parameters: Named) -> bool:
    """Return whether a segment can hold the parameters: there are any, and they are contiguous and of a dtype that the
    format knows."""
    local = [local_tensor(parameter) for _, parameter in parameters]
    return bool(local) and all(part.dtype in DTYPES.values() and part.is_contiguous() for part in local)


class LiveState:
    """The parameters, moments and kept gradients of this rank in its segment."""

    def __init__(self, segment: MappedSegment) -> None:
        self.segment = segment
        self._update = BucketedUpdate(segment)
        self._gradients = segment.flat("gradient")

    @classmethod
    def fill(
        cls,
        descriptor: int,
        owner: SegmentOwner,
        parameters: Named,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        padded: Mapping[nn.Parameter, Tensor],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> LiveState:
        """Move parameters and moments into a new segment, and return them as a `LiveState`. The segment counts as empty
        until `commit`.

        Args:
            descriptor: of an empty memfd.
            owner: whose state it is.
            parameters: names and parameters of this rank.
            optimizer: AdamW over these parameters, which has their moments already.
            clip_norm: norm to which gradients are clipped; None: they are not.
            padded: for parameters that torch shards: parameter -> flat memory, with padding, that begins with this
                rank's part.
            bucket_bytes: most bytes of parameters in one bucket of an update.

        Raises:
            OSError: there is no memory for the segment.
        """
        index = describe(parameters, optimizer, clip_norm, padded, bucket_bytes)
        encoded = encode_index(index)
        region_bytes = region_end(index, parameters, padded)
        header = layout_header(owner.generation, owner.rank, owner.plan_sha256, encoded, region_bytes, 3 * bucket_bytes)
        create(descriptor, header, encoded)
        segment = MappedSegment(descriptor, owner.ranks)
        _move(segment, parameters, optimizer, padded, copy=True)
        return cls(segment)

    @classmethod
    def adopt(
        cls,
        segment: MappedSegment,
        parameters: Named,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        padded: Mapping[nn.Parameter, Tensor],
    ) -> LiveState:
        """Make parameters and moments the bytes of a segment that has the state of a step, and return them as a
        `LiveState`. Nothing is copied. The other arguments are those of `fill`.

        Raises:
            SegmentError: the segment is of other parameters, or of another optimizer.
        """
        expected = describe(parameters, optimizer, clip_norm, padded, segment.index.bucket_bytes)
        if expected != segment.index:
            raise SegmentError("the state in memory is of another model, optimizer or layout")
        _move(segment, parameters, optimizer, padded, copy=False)
        return cls(segment)

    def commit(self, step: int, loss_scale: LossScale | None, reducer_state: dict[str, Tensor]) -> None:
        """Note in the segment that it holds the state after `step`, which was loaded into it.

        Args:
            loss_scale: the loss scale after that step; None without one.
            reducer_state: what reducers keep between steps, by name.

        Raises:
            OSError: there is no memory for what reducers keep.
        """
        control = self.segment.control
        self.segment.write_slot(step, reducer_state)
        control.write_verdict(step, StepVerdict(0.0, 0.0, loss_scale))
        control.set_gradients(step)
        control.set_norm(step)
        control.set_state(step)

    @torch.no_grad()
    def keep_gradients(
        self, step: int, gradients: Sequence[Tensor], reducer_state: dict[str, Tensor], row: bytes = b""
    ) -> None:
        """Copy the reduced gradients of a step, and what reducers keep after it, into the segment. Call it before any
        rank can have the gradient's norm.

        Args:
            gradients: this rank's part of each parameter's gradient.
            row: the row of metrics.jsonl of the step, as far as it is known.

        Raises:
            OSError: there is no memory for what reducers keep, and the row.
        """
        self.segment.write_slot(step, reducer_state, row)
        for target, gradient in zip(self._gradients, gradients, strict=True):
            target.view(gradient.shape).copy_(gradient)
        self.segment.control.set_gradients(step)

    def update(self, step: int, verdict: StepVerdict, gradients: Sequence[Tensor]) -> None:
        """Clip the gradients and update parameters and moments; the segment then holds the state after `step`. If the
        norm is not finite, only the number of the step changes.

        Args:
            gradients: the gradients that `keep_gradients` copied; they are clipped in place.
        """
        flat = [gradient.reshape(-1) for gradient in gradients]
        begin(self.segment, step, verdict)
        self._update.run(step, verdict, lambda number: flat[number])


def describe(
    parameters: Named,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None,
    padded: Mapping[nn.Parameter, Tensor],
    bucket_bytes: int,
) -> SegmentIndex:
    """Return the index of a segment for these parameters. The arguments are those of `LiveState.fill`."""
    decays = {p: float(group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    planner = DefaultSavePlanner()
    planner.set_up_planner({name: parameter.detach() for name, parameter in parameters}, is_coordinator=True)
    places = {item.index.fqn: item.tensor_data for item in planner.create_local_plan().items}
    entries, offset = [], 0
    for name, parameter in parameters:
        local, place = local_tensor(parameter), places.get(name)
        # A rank that has no number of a parameter has no place in it.
        start = list(place.chunk.offsets) if place is not None else [0] * parameter.dim()
        entries.append(
            IndexEntry(
                name=name, dtype=str(local.dtype).removeprefix("torch."), item_bytes=local.element_size(),
                shape=list(parameter.shape), chunk_offsets=start, chunk_shape=list(local.shape), offset=offset,
                weight_decay=decays[parameter],
            )
        )  # fmt: skip
        offset = aligned(offset + _room_bytes(parameter, padded))
    settings = optimizer.defaults
    adam = AdamSettings(
        betas=settings["betas"], eps=settings["eps"], fused=bool(settings["fused"]), clip_norm=clip_norm
    )
    return SegmentIndex(optimizer=adam, bucket_bytes=bucket_bytes, entries=entries)


def region_end(index: SegmentIndex, parameters: Named, padded: Mapping[nn.Parameter, Tensor]) -> int:
    """Return the bytes of a region with these parameters."""
    return index.entries[-1].offset + _room_bytes(parameters[-1][1], padded)


def _room_bytes(parameter: nn.Parameter, padded: Mapping[nn.Parameter, Tensor]) -> int:
    whole = padded.get(parameter)
    local = local_tensor(parameter) if whole is None else whole
    return local.numel() * local.element_size()


def local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter or moment: the tensor object itself, whose memory can be replaced. The
    public `to_local` returns a new tensor object."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def _move(
    segment: MappedSegment,
    parameters: Named,
    optimizer: torch.optim.Optimizer,
    padded: Mapping[nn.Parameter, Tensor],
    copy: bool,
) -> None:
    """Make the memory of parameters and moments that of the segment.

    Args:
        copy: whether the present numbers are copied into the segment; otherwise they are lost.
    """
    rooms = segment.flat("model", padding=True)
    for (_, parameter), room in zip(parameters, rooms, strict=True):
        whole, local = padded.get(parameter), local_tensor(parameter)
        if whole is not None and whole.numel():
            target = room[: whole.numel()]
            if copy:
                target.copy_(whole)
            whole.data = target
        if local.numel():
            _point(local, room[: local.numel()], copy)
    for moment in MOMENTS:
        for (_, parameter), room in zip(parameters, segment.flat(moment), strict=True):
            local = local_tensor(optimizer.state[parameter][moment])
            if local.numel():
                _point(local, room, copy)


def _point(tensor: Tensor, memory: Tensor, copy: bool) -> None:
    target = memory.view(tensor.shape)
    if copy:
        target.copy_(tensor)
    tensor.data = target
