"""Chunks of tensors in the memory of several ranks: each rank tells the others which chunks it has, and fetches the
parts that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Place = tuple[str, tuple[int, ...]]
"""Name of a tensor, and where a chunk of it begins, along each dimension."""


@dataclass(frozen=True)
class Request:
    """A part of a chunk that one rank needs."""

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


@dataclass(frozen=True)
class KnownChunk:
    """What all ranks know of a chunk."""

    shape: tuple[int, ...]
    """Shape of the chunk."""
    whole_shape: tuple[int, ...]
    """Shape of the tensor of which it is a chunk."""
    dtype: torch.dtype
    owners: list[int]
    """The ranks that have the chunk, by their numbers in the group."""


class ChunkStore:
    """The chunks of all ranks of a group. Making one is collective."""

    def __init__(
        self, chunks: Mapping[Place, Tensor], whole_shapes: Mapping[str, tuple[int, ...]], group: dist.ProcessGroup
    ) -> None:
        """Tell all ranks which chunks this rank has. The chunks must not change until every rank has fetched what it
        needs.

        Args:
            chunks: place of a chunk -> the chunk, on the CPU.
            whole_shapes: name of a tensor -> shape of the whole tensor.
        """
        self._chunks = chunks
        self._group = group
        self._rank = dist.get_rank(group)
        described = [
            (place, tuple(chunk.shape), whole_shapes[place[0]], chunk.dtype) for place, chunk in chunks.items()
        ]
        everyone: list[list[tuple[Place, tuple[int, ...], tuple[int, ...], torch.dtype]]]
        everyone = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, described, group=group)
        self.known: dict[Place, KnownChunk] = {}
        """Place of a chunk -> what is known of the chunk."""
        for rank, chunks_of_rank in enumerate(everyone):
            for place, shape, whole, dtype in chunks_of_rank:
                self.known.setdefault(place, KnownChunk(shape, whole, dtype, [])).owners.append(rank)

    def fetch(self, requests: Sequence[Request]) -> Iterator[tuple[int, Tensor]]:
        """Yield for each request its position in `requests` and the part of the chunk, in any order. A part may share
        the memory of this rank's chunk. Collective: every rank must take all that is yielded to it."""
        remote: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            if request.place in self._chunks:
                yield number, request.cut(self._chunks[request.place])
            else:
                owners = self.known[request.place].owners
                remote.setdefault(owners[self._rank % len(owners)], []).append(number)
        wanted = {owner: [requests[number] for number in numbers] for owner, numbers in remote.items()}
        everyone: list[dict[int, list[Request]]] = [{} for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(everyone, wanted, group=self._group)
        sends = []
        for rank, requested in enumerate(everyone):
            for request in requested.get(self._rank, []):
                part = request.cut(self._chunks[request.place]).contiguous()
                sends.append((part, dist.isend(part, dist.get_global_rank(self._group, rank), group=self._group)))
        for owner, numbers in remote.items():
            for number in numbers:
                part = torch.empty(requests[number].lengths, dtype=self.known[requests[number].place].dtype)
                dist.recv(part, dist.get_global_rank(self._group, owner), group=self._group)
                yield number, part
        for _, work in sends:
            assert work is not None, "this rank is in the group"
            work.wait()
