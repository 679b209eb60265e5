"""Gives the ranks of a new plan what codecs kept in the segments of an old one: residuals, and counts of steps.

A residual is the part of a replica's gradient that the replica has not sent yet. Gradients are divided by the targets
of the global batch before they are summed over replicas, so only the sum of all residuals counts, however many replicas
there are: each old residual is added to that of one new replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.checkpoint.memory.chunks import ChunkStore, KnownChunk, Place, Request
from hpctrain.checkpoint.memory.mapping import MappedSegment
from hpctrain.checkpoint.memory.segment import IndexEntry
from hpctrain.records.history.memory_state import MemorySource
from hpctrain.records.plan.levels import part_shape
from hpctrain.records.plan.plan import Plan

SlotState = tuple[dict[str, Tensor], int]
"""What a reducer kept after a step, by name, and the number of ranks of the plan that then ran."""
_COUNTS = ("step", "steps")
"""Names of counts of steps, which are equal on all ranks."""
_RANKS = "ranks"
_UNSENT = "not sent yet of their gradients"
_NAMED = 3
"""Most parameters that a reason names."""


def load_codec_state(
    segments: Sequence[MappedSegment],
    source: MemorySource,
    plans: tuple[Plan, Plan],
    rank: int,
    compressed: Sequence[tuple[int, IndexEntry]],
    group: dist.ProcessGroup,
) -> tuple[dict[str, Tensor], str | None]:
    """Return the state that this rank's reducer continues with, as `Reducer.load_state` takes it, and why a part of
    what the old ranks kept is dropped; None: all of it is kept. Collective.

    With the same layout of ranks and the same codec, each rank gets the state of the old rank of its number. With the
    same codec and another layout, residuals of parameters are moved, and all other state (PowerSGD's factors,
    variances) starts as in a new run. No residual can be moved if either plan has one replica, or shards over all
    replicas. With another codec, everything is dropped.

    Args:
        segments: those that this rank has mapped.
        source: the state in memory from which the generation starts.
        plans: the plan of the segments, and the new plan.
        rank: this rank of the new plan.
        compressed: for each of this rank's gradients that the new plan compresses, its number among the rank's
            parameters and its place in the whole parameter.
        group: all ranks of the new plan.

    Raises:
        SegmentError: a segment is damaged.
    """
    old, new = plans
    if not old.codec.has_state or old.dp == 1:
        return {}, None
    slots = {segment: segment.read_slot(source.step) for segment in segments}
    if old.reduction_sha256 == new.reduction_sha256:
        state, ranks, unkept = *_same_rank(slots, rank, group), list[str]()
    elif old.codec != new.codec:
        return {}, f"{_begin(source)} is of another compression: what ranks had {_UNSENT} is dropped"
    elif _replicas(old) == 1 or _replicas(new) == 1:
        return {}, _no_replicas(source, "old" if _replicas(old) == 1 else "new")
    else:
        state, ranks, unkept = _moved(slots, plans, rank, compressed, group)
    reasons = [lost] if (lost := _lost(source, ranks)) else []
    if unkept:
        names = ", ".join(unkept[:_NAMED]) + ", …" * (len(unkept) > _NAMED)
        reasons.append(f"the new plan does not compress {names}, of which the residuals are dropped")
    return state, f"{_begin(source)}: {'; '.join(reasons)}" if reasons else None


def own_codec_state(segment: MappedSegment, source: MemorySource, new: Plan) -> tuple[dict[str, Tensor], str | None]:
    """Return what `load_codec_state` returns, for a rank that continues on a segment: the state that is in it.

    Raises:
        SegmentError: the segment is damaged.
    """
    state, ranks = segment.read_slot(source.step)
    if state and new.dp == 1:
        return {}, _no_replicas(source, "new")
    lost = _lost(source, ranks)
    return state, f"{_begin(source)}: {lost}" if lost else None


def _begin(source: MemorySource) -> str:
    return f"the state of step {source.step} in memory"


def _no_replicas(source: MemorySource, plan: str) -> str:
    return (
        f"{_begin(source)} is of another layout of ranks, and the {plan} plan keeps no residuals of replicas: what "
        f"ranks had {_UNSENT} is dropped"
    )


def _lost(source: MemorySource, ranks: int) -> str | None:
    """Return in words how many of the ranks that wrote the state have no part left in any memory; None if each has one.

    Args:
        ranks: how many ranks wrote it, as the segments' slots say; 0: they kept nothing. The plan in the segments'
            headers may have had more ranks, because ranks of later plans continued on its segments.
    """
    lost = ranks - len(source.holders)
    return f"nobody has what {lost} of {ranks} ranks had {_UNSENT}" if lost > 0 else None


def _replicas(plan: Plan) -> int:
    """Return over how many copies of the state a codec sums, each of which has residuals of whole parameters or of
    parts of them. 1: there is one replica, or the codec sums in the reduce-scatter of sharded gradients."""
    return plan.dp // (plan.shards * plan.part_replicas)


def _columns(plan: Plan) -> dict[int, tuple[int, int]]:
    """Return rank -> its pipeline rank, and its place among the replicas over which the codec sums."""
    return {
        rank: (pp, dp // (plan.shards * plan.part_replicas))
        for pp, column in enumerate(plan.mesh())
        for dp, row in enumerate(column)
        for rank in row
    }


def _summed_part(plan: Plan, rank: int, entry: IndexEntry) -> tuple[list[int], IndexEntry]:
    """Return what the reducer of a rank has a residual of: its shape, with padding, and its place without padding. With
    sums by level it is the part of the gradient that the rank sums between nodes, else the rank's whole part."""
    if plan.part_replicas == 1:
        return entry.chunk_shape, entry
    rows, *others = entry.chunk_shape or [1]
    padded = part_shape(entry.chunk_shape, plan.part_replicas)
    first = min(padded[0] * (plan.coordinate(rank)[1] % plan.part_replicas), rows)
    offsets = [entry.chunk_offsets[0] + first, *entry.chunk_offsets[1:]] if entry.chunk_shape else []
    shape = [min(padded[0], rows - first), *others] if entry.chunk_shape else []
    return padded, entry.model_copy(update={"chunk_offsets": offsets, "chunk_shape": shape})


def _same_rank(slots: Mapping[MappedSegment, SlotState], rank: int, group: dist.ProcessGroup) -> SlotState:
    chunks: dict[Place, Tensor] = {}
    for segment, (state, _) in slots.items():
        for key, tensor in state.items():
            chunks[f"{segment.header.rank}.{key}", (0,) * tensor.dim()] = tensor
    store = ChunkStore(chunks, {place[0]: tuple(chunk.shape) for place, chunk in chunks.items()}, group)
    prefix = f"{rank}."
    requests = [Request(p, p[1], chunk.shape) for p, chunk in store.known.items() if p[0].startswith(prefix)]
    state = {requests[number].place[0].removeprefix(prefix): part for number, part in store.fetch(requests)}
    counts = _agree(0, {_RANKS: max((ranks for _, ranks in slots.values()), default=0)}, [], group)[1]
    return state, counts.get(_RANKS, 0)


def _moved(
    slots: Mapping[MappedSegment, SlotState],
    plans: tuple[Plan, Plan],
    rank: int,
    compressed: Sequence[tuple[int, IndexEntry]],
    group: dist.ProcessGroup,
) -> tuple[dict[str, Tensor], int, list[str]]:
    """Return the state of this rank's reducer, how many ranks wrote the old state, and the parameters that had
    residuals and are not compressed any more."""
    old, new = plans
    columns, counts = _columns(old), dict[str, int]()
    chunks: dict[Place, Tensor] = {}
    whole_shapes: dict[str, tuple[int, ...]] = {}
    for segment, (state, ranks) in slots.items():
        counts |= {key: int(state[key]) for key in _COUNTS if key in state}
        counts[_RANKS] = max(ranks, counts.get(_RANKS, 0))
        pp, replica = columns[segment.header.rank]
        for number, entry in enumerate(segment.index.entries):
            residual = state.get(f"residual.{number}")
            padded, part = _summed_part(old, segment.header.rank, entry)
            if residual is not None and residual.numel() == math.prod(padded) and part.numel:
                name = f"{pp}.{replica}.{entry.name}"
                chunks[name, tuple(part.chunk_offsets)] = residual.view(padded)[: part.chunk_shape[0]]
                whole_shapes[name] = tuple(entry.shape)
    store = ChunkStore(chunks, whole_shapes, group)
    residuals: dict[str, list[tuple[int, Place, KnownChunk]]] = {}
    for place, chunk in sorted(store.known.items()):
        _, of, parameter = place[0].split(".", 2)
        residuals.setdefault(parameter, []).append((int(of), place, chunk))
    held = {source for parts in residuals.values() for source, *_ in parts}
    targets = _targets(held, _replicas(old), _replicas(new))
    pp, replica = _columns(new)[rank]
    first_pp, counts = _agree(pp, counts, [entry.name for _, entry in compressed], group)
    moved = {key: torch.tensor(counts[key]) for key in _COUNTS if key in counts}
    requests, targeted = [], []
    for number, entry in compressed:
        # Of a weight that several pipeline ranks hold, one gets the residuals.
        if first_pp[entry.name] != pp:
            continue
        padded, part = _summed_part(new, rank, entry)
        total = torch.zeros(padded)
        moved[f"residual.{number}"] = total.flatten(1)
        for source, place, chunk in residuals.get(entry.name, []):
            if targets[source] == replica and (both := _overlap(part, place, chunk)):
                request, within = both
                requests.append(request)
                targeted.append(within.cut(total))
    # All tensor-parallel ranks add up in the same order.
    for number, fetched in sorted(store.fetch(requests), key=lambda numbered: numbered[0]):
        targeted[number] += fetched
    return moved, counts.get(_RANKS, 0), sorted(residuals.keys() - first_pp.keys())


def _targets(held: set[int], old: int, new: int) -> dict[int, int]:
    """Return old replica whose residuals are held -> the new replica that gets them: the one of the same number. If
    there are fewer new replicas than old ones, the held old replicas are dealt out over the new ones in turn.

    Args:
        held: the old replicas.
        old: how many old replicas there were.
        new: how many new ones there are.
    """
    return {replica: replica if old <= new else number % new for number, replica in enumerate(sorted(held))}


def _agree(
    pp: int, counts: dict[str, int], names: list[str], group: dist.ProcessGroup
) -> tuple[dict[str, int], dict[str, int]]:
    """Return parameter -> first pipeline rank that compresses it, and the largest of each count. Collective.

    Args:
        pp: pipeline rank of this rank.
        counts: the counts in this rank's segments, by name.
        names: the parameters that this rank compresses.
    """
    everyone: list[tuple[int, dict[str, int], list[str]]] = [(pp, counts, names)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (pp, counts, names), group=group)
    first: dict[str, int] = {}
    agreed: dict[str, int] = {}
    for other, known, names_there in everyone:
        agreed |= {key: max(count, agreed.get(key, 0)) for key, count in known.items()}
        for name in names_there:
            first[name] = min(first.get(name, other), other)
    return first, agreed


def _overlap(entry: IndexEntry, place: Place, chunk: KnownChunk) -> tuple[Request, Request] | None:
    """Return what a chunk and this rank's part of a parameter have in common, as a part of the chunk and as a part of
    the rank's part; None if they have nothing in common."""
    starts = [max(pair) for pair in zip(entry.chunk_offsets, place[1], strict=True)]
    sizes = zip(entry.chunk_offsets, entry.chunk_shape, place[1], chunk.shape, strict=True)
    ends = [min(begin + size, other + length) for begin, size, other, length in sizes]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    of_chunk, of_entry = (
        tuple(start - begin for start, begin in zip(starts, begins, strict=True))
        for begins in (place[1], entry.chunk_offsets)
    )
    return Request(place, of_chunk, lengths), Request(place, of_entry, lengths)
