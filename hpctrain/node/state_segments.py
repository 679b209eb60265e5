"""The shared memory in which the state of this node's workers lies: made before a worker starts, and kept after the
worker's end for as long as a later generation may start from it.

A memfd has no name, so its memory is free when the last process closes it. Nothing of it is left after a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.agent.worker_messages import MemoryOrder, SnapshotMemory
from hpctrain.checkpoint.memory.neighbours import hosts_of
from hpctrain.checkpoint.memory.segment import held_state
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.generation import Generation
from hpctrain.records.history.memory_state import HeldState, MemorySource, StateHolder, StateKind
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import Topology

Pair = tuple[int, int]
"""Descriptors of the two memories in which the snapshots of a rank lie in turn."""


@dataclass
class StateSegments:
    """The segments of one node. An agent calls the methods in this order, for each generation: `orders`, `ready` for
    each worker, and `held` once no worker runs any more."""

    node: str
    switches: Mapping[str, str] | None = None
    """Node -> name of its switch, to choose nodes for snapshots; None: no snapshots are made."""
    keeps_live: bool = True
    """Whether CPU workers train on segments that outlive them."""
    _live: dict[int, int] = field(default_factory=dict)
    """Rank of the newest generation -> descriptor of its segment."""
    _snapshots: dict[int, Pair] = field(default_factory=dict)
    """Rank of the newest generation, of this node or another -> memory for the snapshots of its state."""
    _old: dict[int, StateKind] = field(default_factory=dict)
    """Segments that the newest generation starts from -> how their state came there."""
    _starting: set[int] = field(default_factory=set)
    """Ranks that have not reported yet that they are ready."""
    _ranks: frozenset[int] = frozenset()
    """Ranks of the newest generation on this node."""

    def orders(self, record: Generation, plan: Plan, ranks: Sequence[int]) -> dict[int, MemoryOrder]:
        """Return rank -> the memory for its worker, for the workers of this node. Only workers on a CPU get a segment
        of their own, and only with `keeps_live`. Segments that the generation does not start from are given up.

        Args:
            record: the generation that starts.
            plan: its plan.
            ranks: the ranks on this node.

        Raises:
            OSError: no descriptor is free for a new segment.
        """
        before, source = self._kinds(), record.memory
        snapshots = self._snapshots
        self._live, self._snapshots, self._old, self._starting = {}, {}, {}, set(ranks)
        self._ranks = frozenset(ranks)
        used = {fd: state for fd, state in self._read(before) if source and self._is_source(state, source)}
        owners = self._owners(plan, ranks)
        if source is not None and source.continued:
            live = {state.rank: fd for fd, state in used.items() if state.kind == "live"}
            continued = dict(enumerate(source.continued))
            self._live = {rank: live[continued[rank]] for rank in ranks if continued.get(rank) in live}
            wanted = {owner for written in owners.values() for owner in written}
            self._snapshots = {rank: pair for rank, pair in snapshots.items() if rank in wanted}
        elif ranks:
            self._old = {fd: state.kind for fd, state in used.items()}
        for descriptor in before.keys() - self._kinds().keys():
            os.close(descriptor)
        for rank in ranks:
            if rank not in self._live and self._trains_on_segment(plan.ranks[rank]):
                self._live[rank] = os.memfd_create(f"hpctrain-state-{rank}")
        old = list(self._old)
        return {
            rank: MemoryOrder(
                live=self._live.get(rank), source=source, segments=tuple(old[place :: len(ranks)]),
                snapshots=tuple(self._snapshot_memory(owner) for owner in owners.get(rank, ())),
            )
            for place, rank in enumerate(ranks)
        }  # fmt: skip

    def _owners(self, plan: Plan, ranks: Sequence[int]) -> dict[int, list[int]]:
        """Return rank of this node -> the ranks whose snapshots its worker writes: its own first. Nobody makes any if
        segments outlive all workers, and no node alone holds a part of the state."""
        if self.switches is None:
            return {}
        hosts = hosts_of(plan, self.switches)
        if not hosts and all(map(self._trains_on_segment, plan.ranks)):
            return {}
        return {rank: [rank, *(guest for guest, host in hosts.items() if host == rank)] for rank in ranks}

    def _trains_on_segment(self, device: DeviceId) -> bool:
        return self.keeps_live and not device.device.startswith("cuda")

    def _snapshot_memory(self, rank: int) -> SnapshotMemory:
        if rank not in self._snapshots:
            self._snapshots[rank] = (
                os.memfd_create(f"hpctrain-snapshot-{rank}"),
                os.memfd_create(f"hpctrain-snapshot-{rank}"),
            )
        return SnapshotMemory(rank=rank, descriptors=self._snapshots[rank])

    def _is_source(self, state: HeldState, source: MemorySource) -> bool:
        """Whether a generation starts from a segment of this node."""
        wanted = StateHolder(rank=state.rank, node=self.node, kind=state.kind)
        return state.generation == source.generation and wanted in source.holders and state.reaches(source.step)

    def _kinds(self) -> dict[int, StateKind]:
        """Return descriptor of each segment -> how its state came there."""
        kinds: dict[int, StateKind] = dict.fromkeys(self._live.values(), "live")
        kinds |= self._old
        for rank, pair in self._snapshots.items():
            kinds |= dict.fromkeys(pair, "snapshot" if rank in self._ranks else "guest")
        return kinds

    @staticmethod
    def _read(kinds: Mapping[int, StateKind]) -> list[tuple[int, HeldState]]:
        states = [(descriptor, held_state(descriptor, kind)) for descriptor, kind in kinds.items()]
        return [(descriptor, state) for descriptor, state in states if state is not None]

    def ready(self, rank: int) -> None:
        """Note that the worker of `rank` has its state. When all workers of the node have theirs, the segments that
        they started from are given up: a worker is ready only after all ranks of the generation have loaded their
        state."""
        self._starting.discard(rank)
        if not self._starting:
            while self._old:
                os.close(self._old.popitem()[0])

    def held(self) -> tuple[HeldState, ...]:
        """Return the parts of states that the segments hold, each of one rank. Only call it when no worker runs."""
        return tuple(state for _, state in self._read(self._kinds()))

    def close(self) -> None:
        """Give up all segments."""
        for descriptor in self._kinds():
            os.close(descriptor)
        self._live, self._snapshots, self._old = {}, {}, {}


def switches_of(topology: Topology) -> dict[str, str]:
    """Return node -> name of the switch next to it, for the nodes whose switch is known."""
    clusters = [cluster for cluster in topology.fabric.clusters if cluster.level == 1]
    return {node: cluster.id for cluster in clusters for node in cluster.members}
