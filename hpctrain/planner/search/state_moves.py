"""State that changes its device when a plan replaces another, and ways to move less of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.format.device_id import DeviceId
from hpctrain.records.plan.plan import Move, Plan

MAX_SLOWDOWN = 0.01
"""Share of a step's time that keeping state in place may cost."""

HeldState = dict[DeviceId, tuple[int, frozenset[int]]]
"""Device -> (its position in the tensor-parallel group, the blocks whose state it holds)."""


def minimise_moves(cost: CostModel, best: Prediction, previous: Plan, kept: Sequence[Layout] = ()) -> Prediction:
    """Return a plan about as fast as the best that moves less state.

    That is the first of `kept` that is fast enough. Else it is the best with equal nodes exchanged, so that devices
    keep the blocks they hold, if it stays about as fast. Else it is the best itself.

    Args:
        kept: layouts that reuse the surviving devices of the previous plan, the one with the fewest moves first.
    """
    limit = best.total * (1 + MAX_SLOWDOWN)
    for layout in kept:
        if layout.memory_options == best.layout.memory_options:
            left = predict(cost, layout, whole=True)
            if left.total <= limit:
                return left
    if previous.tp != best.layout.tp:
        return best
    exchanged = _exchanged(cost, best.layout, _held(previous))
    if exchanged is None:
        return best
    other = predict(cost, exchanged, whole=True)
    return other if other.total <= limit else best


def _exchanged(cost: CostModel, layout: Layout, held: HeldState) -> Layout | None:
    """The layout with equal nodes exchanged so that the fewest blocks move; None if no exchange helps or fits."""
    slots = _by_node(layout)
    free = _exchange(cost, slots, _missing(slots, held))
    if all(a == b for a, b in free.items()):
        return None
    places = {
        unit.device_ids: other
        for node, taker in free.items()
        for (unit, _), (other, _) in zip(slots[node], slots[taker], strict=True)
    }
    placement = Placement(tuple(places[unit.device_ids] for unit in row) for row in layout.placement)
    moved = Layout(
        placement, layout.schedule, layout.micro_batch, layout.micro_batches, layout.blocks, layout.memory_options
    )
    return None if moved.shards != layout.shards or moved.memory_shortage(cost.memory) else moved


def moves_between(previous: Plan, plan: Plan) -> tuple[list[Move], list[int]]:
    """Return the moves of state, and the blocks that have to come from a checkpoint.

    The latter are those whose state no device of the new plan holds. If tp changes, every block is split anew and
    counts as moved.
    """
    held, wanted = _held(previous), _held(plan)
    same_cut = previous.tp == plan.tp
    holders: dict[tuple[int, int], list[DeviceId]] = {}
    for device_id, (position, blocks) in held.items():
        if device_id in wanted:
            for block in blocks:
                holders.setdefault((position if same_cut else 0, block), []).append(device_id)
    sent: dict[DeviceId, int] = {}
    moves: list[Move] = []
    lost: set[int] = set()
    for device_id, (position, blocks) in wanted.items():
        own = held.get(device_id, (position, frozenset()))
        missing = blocks - own[1] if same_cut and own[0] == position else blocks
        source_of: dict[int, DeviceId] = {}
        for block in sorted(missing):
            sources = holders.get((position if same_cut else 0, block))
            if not sources:
                lost.add(block)
                continue
            # Prefer a source on the same node, then the one that has sent the least.
            source_of[block] = min(
                sources, key=lambda source: (source.node != device_id.node, sent.get(source, 0), source)
            )
            sent[source_of[block]] = sent.get(source_of[block], 0) + 1
        moves += _runs(source_of, device_id)
    return moves, sorted(lost)


def _runs(source_of: dict[int, DeviceId], target: DeviceId) -> list[Move]:
    """Join consecutive blocks from one device into one move; drop moves of a device to itself."""
    found: list[Move] = []
    for block, source in source_of.items():
        if found and found[-1].source == source and found[-1].layers[1] == block:
            found[-1] = Move(layers=(found[-1].layers[0], block + 1), source=source, target=target)
        else:
            found.append(Move(layers=(block, block + 1), source=source, target=target))
    return [move for move in found if move.source != move.target]


def _held(plan: Plan) -> HeldState:
    found: dict[DeviceId, tuple[int, set[int]]] = {}
    for replica in plan.replicas:
        for stage, row in zip(plan.stages, replica.devices, strict=True):
            for position, device_id in enumerate(row):
                found.setdefault(device_id, (position, set()))[1].update(range(*stage.layers))
    return {device_id: (position, frozenset(blocks)) for device_id, (position, blocks) in found.items()}


UnitsByNode = dict[str, list[tuple[TensorParallelGroup, frozenset[int]]]]
"""Node -> its tensor-parallel groups, each with the blocks that it is to hold."""


def _by_node(layout: Layout) -> UnitsByNode:
    """The layout's tensor-parallel groups by node, in the order of the topology."""
    blocks: list[range] = []
    for count in layout.blocks:
        start = blocks[-1].stop if blocks else 0
        blocks.append(range(start, start + count))
    found: UnitsByNode = {}
    for row in layout.placement:
        for unit, own in zip(row, layout.stages_by_rank, strict=True):
            wanted = frozenset(block for stage in own for block in blocks[stage])
            found.setdefault(unit.devices[0].node, []).append((unit, wanted))
    return {node: sorted(units, key=lambda item: item[0].index) for node, units in found.items()}


def _missing(slots: UnitsByNode, held: HeldState) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[node, other] -> blocks that would have to be sent to the other node if it took the node's place."""
    none: frozenset[int] = frozenset()
    own = [[held.get(unit.device_ids[0], (0, none))[1] for unit, _ in units] for units in slots.values()]
    wanted = [[blocks for _, blocks in units] for units in slots.values()]
    return np.array([[_lacking(a, b) for b in own] for a in wanted], dtype=np.int64)


def _lacking(wanted: Sequence[frozenset[int]], own: Sequence[frozenset[int]]) -> int:
    if len(wanted) != len(own):
        return 0  # never exchanged
    return sum(len(a - b) for a, b in zip(wanted, own, strict=True))


def _exchange(
    cost: CostModel, slots: UnitsByNode, missing: np.ndarray[tuple[int, int], np.dtype[np.int64]]
) -> dict[str, str]:
    """Node -> the equal node that takes its place, chosen so that the fewest blocks are sent."""
    from scipy.optimize import linear_sum_assignment  # a third of an agent's start, and few agents plan again

    names = list(slots)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, name in enumerate(names):
        kinds.setdefault(tuple(cost.kind(unit) for unit, _ in slots[name]), []).append(number)
    found = {}
    for equal in kinds.values():
        taken = missing[np.ix_(equal, equal)]
        for a, b in zip(*linear_sum_assignment(taken), strict=True):
            found[names[equal[a]]] = names[equal[b]]
    return found
