"""Layouts that pack stages, or pipelines, into as few nodes as possible, so that little traffic leaves a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpctrain.planner.bounds.option import Option
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.search.local_search import faster_of
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.simulate.predict import Prediction


def pack_within_nodes(space: SearchSpace, layout: Layout, best: Prediction) -> Prediction:
    """Return the fastest of `best` and the packed layouts with the same degrees, schedule and micro-batch size.

    Args:
        layout: a layout of the space. Blocks and micro-batches stay at their pipeline rank and replica if the kind of
            device there stays.
    """
    if 1 in (layout.pp, layout.dp):
        return best
    units = space.units(layout.tp)
    for placement in same_kinds(units, layout.placement):
        if space.can_shard(placement):
            best = faster_of(space.cost, best, replace(layout, placement=placement))
    placement = stages_within_nodes(units, layout.pp, layout.dp)
    if space.can_shard(placement):
        best = faster_of(space.cost, best, space.fit_layout(placement, Option.of(layout)))
    return best


def same_kinds(units: Sequence[TensorParallelGroup], placement: Placement) -> Iterator[Placement]:
    """Yield the placement with its stages within nodes, then with its pipelines within nodes.

    The kind of device at each pipeline rank of each replica stays.

    Args:
        units: the tensor-parallel groups to choose from, including those of the placement.
    """
    kinds = list(dict.fromkeys(unit.group_spec for unit in units))
    classes = [[unit for unit in units if unit.group_spec == kind] for kind in kinds]
    rows = _placed(classes, [[kinds.index(unit.group_spec) for unit in row] for row in placement])
    by_rank = zip(*placement, strict=True)
    columns = _placed(classes, [[kinds.index(unit.group_spec) for unit in column] for column in by_rank])
    yield Placement(zip(*columns, strict=True))
    yield Placement(rows)


def stages_within_nodes(units: Sequence[TensorParallelGroup], pp: int, dp: int) -> Placement:
    """Return a placement of the fastest groups of any kind, with stages within nodes.

    The fast groups of all stages are in the same replicas.
    """
    fastest = sorted(units, key=lambda unit: (-unit.flops, unit.index))[: pp * dp]
    stages = groups_within_nodes([fastest], [[dp]] * pp)
    return Placement(zip(*(sorted(stage, key=lambda unit: -unit.flops) for stage in stages), strict=True))


def groups_within_nodes(
    classes: Sequence[Sequence[TensorParallelGroup]], needs: Sequence[Sequence[int]]
) -> list[list[TensorParallelGroup]]:
    """Assign tensor-parallel groups to sets, each within the node that it fills best, or across few nodes.

    Sets that fit into one node are assigned first. Each other set takes the nodes that have most of what it needs.

    Args:
        classes: tensor-parallel groups by class; there are enough of each.
        needs: [set] -> number of groups of each class.

    Returns:
        [set] -> its groups, class by class.
    """
    unused: dict[str, list[list[TensorParallelGroup]]] = {}
    for number, units in enumerate(classes):
        for unit in units:
            unused.setdefault(unit.devices[0].node, [[] for _ in classes])[number].append(unit)
    free = {node: sum(map(len, units)) for node, units in unused.items()}
    groups: list[list[list[TensorParallelGroup]]] = [[[] for _ in classes] for _ in needs]

    def has(node: str, need: Sequence[int]) -> int:
        return sum(min(asked, len(units)) for asked, units in zip(need, unused[node], strict=True))

    def take(node: str, group: int, need: list[int]) -> None:
        for number, units in enumerate(unused[node]):
            taken, unused[node][number] = units[: need[number]], units[need[number] :]
            groups[group][number] += taken
            need[number] -= len(taken)
            free[node] -= len(taken)

    split = []
    for group, asked in enumerate(needs):
        whole = [node for node in unused if has(node, asked) == sum(asked)]
        if whole:
            take(min(whole, key=free.__getitem__), group, list(asked))
        else:
            split.append(group)
    for group in split:
        need = list(needs[group])
        while any(need):
            take(max(unused, key=lambda node: (has(node, need), -free[node])), group, need)
    return [[unit for units in group for unit in units] for group in groups]


def _placed(
    classes: Sequence[Sequence[TensorParallelGroup]], kinds: Sequence[Sequence[int]]
) -> list[tuple[TensorParallelGroup, ...]]:
    """Return sets of tensor-parallel groups packed within nodes, with a group of the given class at each position.

    Args:
        kinds: [set][position] -> class.
    """
    needs = [[group.count(number) for number in range(len(classes))] for group in kinds]
    placed = []
    for group, wanted in zip(groups_within_nodes(classes, needs), kinds, strict=True):
        # `groups_within_nodes` lists the groups of a set class by class.
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        by_place = dict(zip(order, group, strict=True))
        placed.append(tuple(by_place[place] for place in range(len(wanted))))
    return placed
