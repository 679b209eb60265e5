"""Placements that keep what sums together, or sends to each other, within as few nodes as can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpctrain.planner.unit import Unit


def groups_within_nodes(classes: Sequence[Sequence[Unit]], needs: Sequence[Sequence[int]]) -> list[list[Unit]]:
    """Groups of units, each within the node that is filled the best by it, or across the nodes that hold most of it.

    Groups that a node holds are put there before the others are, the first ones first.

    Args:
        classes: units by class; there are enough of each.
        needs: [group] -> units of each class.

    Returns:
        [group] -> its units by class, those of a node one after the other.
    """
    left: dict[str, list[list[Unit]]] = {}
    for number, units in enumerate(classes):
        for unit in units:
            left.setdefault(unit.workers[0].node, [[] for _ in classes])[number].append(unit)
    free = {node: sum(map(len, units)) for node, units in left.items()}
    found: list[list[list[Unit]]] = [[[] for _ in classes] for _ in needs]

    def supply(node: str, need: Sequence[int]) -> int:
        return sum(min(asked, len(units)) for asked, units in zip(need, left[node], strict=True))

    def take(node: str, group: int, need: list[int]) -> None:
        for number, units in enumerate(left[node]):
            taken = units[: need[number]]
            left[node][number] = units[len(taken) :]
            found[group][number] += taken
            need[number] -= len(taken)
            free[node] -= len(taken)

    split = []
    for group, asked in enumerate(needs):
        holding = [node for node in left if supply(node, asked) == sum(asked)]
        if holding:
            take(min(holding, key=free.__getitem__), group, list(asked))
        else:
            split.append(group)
    for group in split:
        need = list(needs[group])
        while any(need):
            take(max(left, key=lambda node: (supply(node, need), -free[node])), group, need)
    return [[unit for units in group for unit in units] for group in found]


def unlike_nodes(units: Sequence[Unit]) -> bool:
    """Whether some nodes have more of the units than others."""
    return len(set(Counter(unit.workers[0].node for unit in units).values())) > 1
