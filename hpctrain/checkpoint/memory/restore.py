"""Fills the state of a new plan from segments of an old one. The ranks on a node that holds a segment map it; parts
that other nodes need are sent over the process group. torch's planner of distributed checkpoints (DCP) decides which
part of which chunk a rank needs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hpctrain.base.errors import CheckpointError, InputError
from hpctrain.checkpoint.memory.mapping import DTYPES, MappedSegment
from hpctrain.checkpoint.memory.segment import REGIONS, IndexEntry, SegmentError, StepVerdict, read_verdict
from hpctrain.checkpoint.memory.update import finish
from hpctrain.checkpoint.save_and_load import first_failure, last_line
from hpctrain.records.format.input_file import parse_json_line
from hpctrain.records.history.manifest import LossScale
from hpctrain.records.history.run_log import MetricRow

Place = tuple[str, tuple[int, ...]]
"""Name of a tensor in a checkpoint, and where a chunk of it begins, along each dimension."""


@dataclass(frozen=True)
class RestoredState:
    """What is restored from memory beside tensors."""

    step: int
    loss_scale: LossScale | None
    """The loss scale after `step`; None without one."""
    row: MetricRow | None = None
    """The step's row of metrics.jsonl, which the file may lack; None: the row is not known."""


def finish_everywhere(segments: Sequence[MappedSegment], step: int, group: dist.ProcessGroup) -> RestoredState:
    """Bring all segments of all ranks to a step. Collective.

    Args:
        segments: those that this rank has mapped.
        step: the step; a segment that is one step behind is finished.
        group: the ranks that restore together.

    Raises:
        SegmentError: a segment cannot be brought to that step.
    """
    known = next((v for s in segments if (v := read_verdict(s.descriptor, step)) is not None), None)
    everyone: list[tuple[float, float, dict[str, Any] | None, bytes | None] | None] = [None] * dist.get_world_size(
        group
    )
    packed = None
    if known is not None:
        row = next((row for s in segments if (row := s.read_row(step)) is not None), None)
        packed = known.norm, known.lr, known.loss_scale.to_json() if known.loss_scale is not None else None, row
    dist.all_gather_object(everyone, packed, group=group)
    norm, lr, scale, row = next((one for one in everyone if one is not None), (0.0, 0.0, None, None))
    if all(one is None for one in everyone):
        raise SegmentError(f"no state in memory has the gradient norm of step {step}")
    verdict = StepVerdict(norm, lr, LossScale.model_validate(scale) if scale is not None else None)
    for segment in segments:
        finish(segment, step, verdict)
    return RestoredState(step, verdict.loss_scale, _completed(row, norm) if row is not None else None)


def _completed(row: bytes, norm: float) -> MetricRow | None:
    """Return the row of metrics.jsonl that a worker had made before it knew the norm; None if it is damaged."""
    with contextlib.suppress(InputError):
        made = MetricRow.from_json(parse_json_line(row))
        finite = math.isfinite(norm)
        skipped = None if made.loss_scale is None else not finite
        return made.model_copy(update={"grad_norm": norm if finite else None, "skipped": skipped})
    return None


def load_from_segments(tensors: dict[str, Tensor], segments: Sequence[MappedSegment], group: dist.ProcessGroup) -> None:
    """Load the state that segments hold together into `tensors`, in place. Collective.

    Args:
        tensors: this rank's part of the state of the new plan, by name, as `checkpoint.state.collect` returns it.
        segments: the segments that this rank has mapped, all of one step.
        group: the ranks that load together.

    Raises:
        CheckpointError: the segments do not hold a tensor, or not all of it.
    """
    reader = _SegmentReader(segments, group)
    try:
        dcp.load(tensors, storage_reader=reader, process_group=group)
    except dcp.api.CheckpointException as error:
        words = last_line(first_failure(error)[1])
        raise CheckpointError(f"the state in memory cannot be loaded: {words}") from None


@dataclass(frozen=True)
class _Request:
    """A part of a chunk that one rank needs from another."""

    place: Place
    offsets: tuple[int, ...]
    """Where the part begins in the chunk."""
    lengths: tuple[int, ...]
    """Size of the part along each dimension."""

    def cut(self, chunk: Tensor) -> Tensor:
        """Return the part of the chunk."""
        for dim, (start, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            chunk = chunk.narrow(dim, start, length)
        return chunk


class _SegmentReader(dcp.StorageReader):
    """Reads segments for DCP. Making a reader is collective: the ranks exchange the indices of their segments."""

    def __init__(self, segments: Sequence[MappedSegment], group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._chunks: dict[Place, Tensor] = {}
        """The chunks in this rank's segments."""
        for segment in segments:
            tensors = segment.tensors()
            for entry in _filled(segment.index.entries):
                for region in REGIONS[:3]:
                    self._chunks.setdefault(_place(region, entry), tensors[f"{region}.{entry.name}"])
        entries = [entry.to_json() for segment in segments for entry in _filled(segment.index.entries)]
        everyone: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, entries, group=group)
        self._owners: dict[Place, list[int]] = {}
        """Chunk -> the ranks that have it mapped."""
        known: dict[str, TensorStorageMetadata] = {}
        for rank, described in enumerate(everyone):
            for entry in map(IndexEntry.model_validate, described):
                chunk = ChunkStorageMetadata(torch.Size(entry.chunk_offsets), torch.Size(entry.chunk_shape))
                for region in REGIONS[:3]:
                    owners = self._owners.setdefault(_place(region, entry), [])
                    properties = TensorProperties(dtype=DTYPES[entry.dtype])
                    tensor = TensorStorageMetadata(properties, torch.Size(entry.shape), [])
                    tensor = known.setdefault(f"{region}.{entry.name}", tensor)
                    if not owners:
                        tensor.chunks.append(chunk)
                    if rank not in owners:
                        owners.append(rank)
        self._dtypes = {name: tensor.properties.dtype for name, tensor in known.items()}
        self._metadata = Metadata(state_dict_metadata=dict(known))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the parts that this rank has mapped, and exchange the others with the other ranks. Collective."""
        remote: dict[int, list[tuple[_Request, ReadItem]]] = {}
        for item in plan.items:
            request = _Request(_index_place(item.storage_index), tuple(item.storage_offsets), tuple(item.lengths))
            chunk = self._chunks.get(request.place)
            if chunk is not None:
                _store(planner, item, request.cut(chunk))
            else:
                owners = self._owners[request.place]
                remote.setdefault(owners[self._rank % len(owners)], []).append((request, item))
        self._exchange(remote, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _exchange(self, remote: Mapping[int, Sequence[tuple[_Request, ReadItem]]], planner: LoadPlanner) -> None:
        wanted = {owner: [request for request, _ in items] for owner, items in remote.items()}
        everyone: list[dict[int, list[_Request]]] = [{} for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(everyone, wanted, group=self._group)
        sends = []
        for rank, requests in enumerate(everyone):
            for request in requests.get(self._rank, []):
                part = request.cut(self._chunks[request.place]).contiguous()
                sends.append((part, dist.isend(part, dist.get_global_rank(self._group, rank), group=self._group)))
        for owner, items in remote.items():
            for request, item in items:
                part = torch.empty(request.lengths, dtype=self._dtypes[request.place[0]])
                dist.recv(part, dist.get_global_rank(self._group, owner), group=self._group)
                _store(planner, item, part)
        for _, work in sends:
            assert work is not None, "this rank is in the group"
            work.wait()


@torch.no_grad()
def _store(planner: LoadPlanner, item: ReadItem, part: Tensor) -> None:
    target = planner.resolve_tensor(item)
    target.copy_(part.view(target.shape))
    planner.commit_tensor(item, target)


def _filled(entries: Sequence[IndexEntry]) -> Iterator[IndexEntry]:
    """Yield the entries of the parameters of which the rank has at least one number."""
    return (entry for entry in entries if entry.numel)


def _place(region: str, entry: IndexEntry) -> Place:
    return f"{region}.{entry.name}", tuple(entry.chunk_offsets)


def _index_place(index: MetadataIndex) -> Place:
    return index.fqn, tuple(index.offset or ())
