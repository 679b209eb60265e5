"""Chooses the state in memory from which a generation starts: a pure function of what the nodes hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.records.history.memory_state import KINDS, HeldState, StateHolder
from hpctrain.records.plan.plan import Plan

Piece = tuple[int, int, int]
"""Pipeline rank, number of the shard, and tensor-parallel rank. Two ranks of a plan hold the same part of the training
state if these three numbers are equal."""


@dataclass(frozen=True)
class MemoryChoice:
    """The state in memory to start from."""

    generation: int
    """Generation in which the segments were filled."""
    step: int
    """Step of the state; parts that are one step behind are finished first."""
    continued: tuple[int, ...]
    """Rank of the new plan -> the rank of the old plan on whose segment it continues; (): all get new segments."""
    holders: tuple[StateHolder, ...]
    """The parts that are read: one of each rank of the old plan of which a part is left, in the order of ranks. A part
    of kind `live` is preferred."""


def pieces_of(plan: Plan) -> dict[int, Piece]:
    """Return rank -> which part of the training state the rank holds."""
    return {
        rank: (pp, dp % plan.shards, tp)
        for pp, column in enumerate(plan.mesh())
        for dp, row in enumerate(column)
        for tp, rank in enumerate(sorted(row))
    }


def _contents_of(plan: Plan) -> list[tuple[object, ...]]:
    """Return for each rank all that decides which numbers its segment holds, and where. If these values are equal,
    ranks of two plans for one model hold the same."""
    owners = plan.stage_owner()
    common = plan.zero, plan.shards, plan.tp, plan.codec, plan.part_replicas
    # With sums by level, reducers keep residuals of a part of each gradient.
    parts = {rank: dp % plan.part_replicas for column in plan.mesh() for dp, row in enumerate(column) for rank in row}
    contents: list[tuple[object, ...]] = []
    for rank, (pp, shard, tp) in sorted(pieces_of(plan).items()):
        layers = tuple(stage.layers for number, stage in enumerate(plan.stages) if owners[number] == pp)
        contents.append((*common, layers, shard, tp, parts[rank]))
    return contents


def choose_restore(
    inventories: Mapping[str, Sequence[HeldState]], plans: Mapping[int, Plan], new: Plan, newer_than: int = -1
) -> MemoryChoice | None:
    """Return the newest state of which the nodes of a new plan hold every piece; None if there is none. If two
    generations have a state of the same step, the one on whose segments the new plan can continue is chosen, else that
    of the newer generation.

    A part that is one step behind the state counts if it has the complete gradients of the state's last step and any
    part has their norm.

    Args:
        inventories: node -> the parts that it holds, each of one rank.
        plans: generation in which segments were filled -> its plan.
        new: the plan of the next generation. Only nodes that have ranks in it are read from.
        newer_than: a step; only a state of a later step is chosen. -1: a state of any step.
    """
    choices: list[MemoryChoice] = []
    nodes = set(new.nodes)
    for generation, plan in plans.items():
        sha256 = plan.sha256()
        held = [
            (node, state)
            for node, states in sorted(inventories.items())
            if node in nodes
            for state in states
            if state.generation == generation and state.plan_sha256 == sha256 and state.rank < plan.world_size
        ]
        choice = _newest(generation, plan, held, new)
        if choice is not None and choice.step > newer_than:
            choices.append(choice)
    return max(choices, key=lambda choice: (choice.step, bool(choice.continued), choice.generation), default=None)


def _newest(generation: int, plan: Plan, held: Sequence[tuple[str, HeldState]], new: Plan) -> MemoryChoice | None:
    pieces = pieces_of(plan)
    needed = set(pieces.values())
    for step in sorted({state.step + ahead for _, state in held for ahead in (0, 1)}, reverse=True):
        usable = [(node, state) for node, state in held if state.reaches(step)]
        # A part that has to be finished needs the norm of the step, which any part may have.
        if not any(state.norm_step >= step for _, state in usable):
            usable = [(node, state) for node, state in usable if state.step == step]
        if needed <= {pieces[state.rank] for _, state in usable}:
            return MemoryChoice(generation, step, _continued(usable, plan, new), tuple(_holders(usable)))
    return None


def _continued(usable: Iterable[tuple[str, HeldState]], plan: Plan, new: Plan) -> tuple[int, ...]:
    """Return `MemoryChoice.continued`. Every rank needs a live segment on its node that holds what the rank holds."""
    before, free = _contents_of(plan), {(node, state.rank) for node, state in usable if state.kind == "live"}
    continued: list[int] = []
    for rank, (device, content) in enumerate(zip(new.ranks, _contents_of(new), strict=True)):
        fitting = [old for node, old in sorted(free) if node == device.node and before[old] == content]
        if not fitting:
            return ()
        continued.append(rank if rank in fitting else fitting[0])
        free.remove((device.node, continued[-1]))
    return tuple(continued)


def _holders(usable: Iterable[tuple[str, HeldState]]) -> Iterable[StateHolder]:
    first: dict[int, tuple[str, HeldState]] = {}
    for node, state in sorted(usable, key=lambda pair: (pair[1].rank, KINDS.index(pair[1].kind), pair[0])):
        first.setdefault(state.rank, (node, state))
    for node, state in first.values():
        yield StateHolder(rank=state.rank, node=node, kind=state.kind)
