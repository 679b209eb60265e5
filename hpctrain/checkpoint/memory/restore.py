"""Fills the state of a new plan from segments of an old one. The ranks on a node that holds a segment map it; parts
that other nodes need are sent over the process group. torch's planner of distributed checkpoints (DCP) decides which
part of which chunk a rank needs.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
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
from torch.distributed.tensor import DTensor
from torch.futures import Future

from hpctrain.base.errors import CheckpointError, InputError
from hpctrain.checkpoint.dcp_errors import first_failure, last_line
from hpctrain.checkpoint.memory.chunks import ChunkStore, Place, Request
from hpctrain.checkpoint.memory.mapping import MappedSegment
from hpctrain.checkpoint.memory.segment import REGIONS, SegmentError, StepVerdict, read_verdict
from hpctrain.checkpoint.memory.update import finish
from hpctrain.records.format.input_file import parse_json_line
from hpctrain.records.history.manifest import LossScale
from hpctrain.records.history.run_log import MetricRow


@dataclass(frozen=True)
class RestoredState:
    """What a worker restores beside tensors, from memory or from a checkpoint."""

    step: int
    loss_scale: LossScale | None
    """The loss scale after `step`; None without one."""
    row: MetricRow | None = None
    """The step's row of metrics.jsonl, which the file may lack; None: the row is not known."""


def finish_everywhere(segments: Sequence[MappedSegment], step: int, group: dist.ProcessGroup) -> RestoredState:
    """Bring all segments of all ranks to a step. Return what they hold of it beside tensors. Collective.

    Args:
        segments: those that this rank has mapped.
        step: the step; a segment that is one step behind is finished.
        group: the ranks that restore together.

    Raises:
        SegmentError: a segment cannot be brought to that step, or none has the step's gradient norm.
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
    """Return the row of metrics.jsonl that a worker made before it knew the gradient's norm, with `norm` filled in.
    Return None if the row is damaged."""
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
    chunks, shapes = {}, {}
    for segment in segments:
        parts = segment.tensors()
        for entry in segment.index.entries:
            for name in (f"{region}.{entry.name}" for region in REGIONS[:3] if entry.numel):
                chunks[name, tuple(entry.chunk_offsets)], shapes[name] = parts[name], tuple(entry.shape)
    reader = _SegmentReader(ChunkStore(chunks, shapes, group), {name: _numel(part) for name, part in tensors.items()})
    try:
        dcp.load(tensors, storage_reader=reader, process_group=group)
    except dcp.api.CheckpointException as error:
        words = last_line(first_failure(error)[1])
        raise CheckpointError(f"the state in memory cannot be loaded: {words}") from None


def _numel(tensor: Tensor) -> int:
    """Return how many numbers of a tensor this rank has."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()


class _SegmentReader(dcp.StorageReader):
    """Reads chunks in the memory of several ranks for DCP."""

    def __init__(self, store: ChunkStore, needed: Mapping[str, int]) -> None:
        """Read from `store`; `needed` says for the name of a tensor how many of its numbers this rank needs."""
        self._store = store
        self._needed = needed
        known: dict[str, TensorStorageMetadata] = {}
        for (name, offsets), chunk in store.known.items():
            properties, whole = TensorProperties(dtype=chunk.dtype), torch.Size(chunk.whole_shape)
            tensor = known.setdefault(name, TensorStorageMetadata(properties, whole, []))
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(chunk.shape)))
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
        # DCP reads what chunks there are, and leaves the rest of a tensor as it is.
        planned = Counter(dict.fromkeys(self._needed, 0))
        for item in plan.items:
            planned[item.dest_index.fqn] += math.prod(item.lengths)
        missing = [name for name, count in self._needed.items() if planned[name] != count]
        if missing:
            raise SegmentError(f"{missing[0]}: {planned[missing[0]]} of {self._needed[missing[0]]} numbers are there")
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the parts that this rank has mapped, and exchange the others with the other ranks. Collective."""
        requests = [
            Request(_index_place(item.storage_index), tuple(item.storage_offsets), tuple(item.lengths))
            for item in plan.items
        ]
        for number, part in self._store.fetch(requests):
            _store(planner, plan.items[number], part)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@torch.no_grad()
def _store(planner: LoadPlanner, item: ReadItem, part: Tensor) -> None:
    target = planner.resolve_tensor(item)
    target.copy_(part.view(target.shape))
    planner.commit_tensor(item, target)


def _index_place(index: MetadataIndex) -> Place:
    return index.fqn, tuple(index.offset or ())
