"""The shared memory in which the state of this node's workers lies: made before a worker starts, kept after its end for
as long as a later generation may start from it.

A memfd has no name, so its memory is free when the last process closes it. Nothing of it is left after a run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctrain.agent.worker_messages import MemoryOrder
from hpctrain.checkpoint.memory.segment import held_state
from hpctrain.records.history.generation import Generation
from hpctrain.records.history.memory_state import HeldState
from hpctrain.records.plan.plan import Plan


@dataclass
class StateSegments:
    """The segments of one node. An agent calls the methods in this order, for each generation: `orders`, `ready` for
    each worker, and `held` once no worker runs any more."""

    node: str
    _live: dict[int, int] = field(default_factory=dict)
    """Rank of the newest generation -> descriptor of its segment."""
    _old: list[int] = field(default_factory=list)
    """Segments that the newest generation starts from."""
    _starting: set[int] = field(default_factory=set)
    """Ranks that have not reported yet that they are ready."""

    def orders(self, record: Generation, plan: Plan, ranks: Sequence[int]) -> dict[int, MemoryOrder]:
        """Return rank -> the memory for its worker, for the workers of this node. Only workers on a CPU get a segment
        of their own. Segments that the generation does not start from are given up.

        Args:
            record: the generation that starts.
            plan: its plan.
            ranks: the ranks on this node.
        """
        before = [*self._live.values(), *self._old]
        self._live, self._old, self._starting = {}, [], set(ranks)
        source = record.memory
        known = {descriptor: state for descriptor in before if (state := held_state(descriptor)) is not None}
        wanted = {holder.rank for holder in source.holders if holder.node == self.node} if source is not None else set()
        used = {
            state.rank: descriptor
            for descriptor, state in known.items()
            if source is not None and state.generation == source.generation and state.rank in wanted
        }
        if source is not None and source.in_place:
            self._live = {rank: used[rank] for rank in ranks if rank in used}
        elif ranks:
            self._old = list(used.values())
        for descriptor in set(before) - set(self._live.values()) - set(self._old):
            os.close(descriptor)
        for rank in ranks:
            if rank not in self._live and not plan.ranks[rank].device.startswith("cuda"):
                self._live[rank] = os.memfd_create(f"hpctrain-state-{rank}")
        return {
            rank: MemoryOrder(live=self._live.get(rank), source=source, segments=tuple(self._old[place :: len(ranks)]))
            for place, rank in enumerate(ranks)
        }

    def ready(self, rank: int) -> None:
        """Note that the worker of `rank` has its state. When all workers of the node have theirs, the segments that
        they started from are given up: a worker is ready only after all ranks of the generation have loaded their
        state."""
        self._starting.discard(rank)
        if not self._starting:
            while self._old:
                os.close(self._old.pop())

    def held(self) -> tuple[HeldState, ...]:
        """Return the parts of states that the segments hold, each of one rank. Only call it when no worker runs."""
        states = (held_state(descriptor) for descriptor in [*self._live.values(), *self._old])
        return tuple(state for state in states if state is not None)

    def close(self) -> None:
        """Give up all segments."""
        for descriptor in [*self._live.values(), *self._old]:
            os.close(descriptor)
        self._live, self._old = {}, []
