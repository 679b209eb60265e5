"""Placements to try: every order of a few tensor-parallel groups, or a few good orders of many groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, groupby, islice
from math import factorial, inf, perm

from hpctrain.planner.devices.tensor_parallel_group import (
    Placement,
    TensorParallelGroup,
    distinct_placements,
    nearest_chain,
)

MAX_ORDERS = 360
"""Largest number of orders of which all are tried; if there are more, only the likely ones are tried."""
FEW_UNITS = 8
"""With more tensor-parallel groups than this, all orders are tried only if there are at most `MAX_ORDERS` / 10."""
MAX_ORDERED_NODES = 64
"""Largest number of nodes that are put in order by the speed of their links."""
MAX_COUNTED_SEQUENCE = 150
"""Length of the longest sequences of tensor-parallel groups that are counted; the number of longer ones may exceed a
float.
"""
MAX_DISTINCT_UNITS = 20
"""Largest number of tensor-parallel groups, all unlike, whose sequences are counted; more groups have too many
sequences.
"""
MAX_SEQUENCES_PER_ORDER = 100
"""Largest number of sequences that are enumerated for each distinct order of groups. Several sequences stand for one
order because they differ only by an exchange of replicas.
"""

MAX_COUNTED_PLACEMENTS = 10**18
"""Number that stands for all numbers of placements that are too large to compute."""


def placements(
    units: Sequence[TensorParallelGroup],
    classes: Sequence[int],
    pp: int,
    dp: int,
    message: Callable[[TensorParallelGroup, TensorParallelGroup], float],
) -> tuple[list[Placement], bool]:
    """Return (placements of pp × dp tensor-parallel groups, whether these are all). If there are too many, only likely
    ones are returned.

    Groups of one class are interchangeable, and so are replicas. Of placements that differ only by an exchange of
    groups of one class or of replicas, one counts.

    Args:
        classes: [group] -> its class (`interchangeable_classes`).
        message: seconds of a stage message between two groups.
    """
    most = MAX_ORDERS if len(units) <= FEW_UNITS else MAX_ORDERS // 10
    if _sequences(classes, pp * dp) <= most * min(factorial(dp), MAX_SEQUENCES_PER_ORDER):
        every = list(islice(all_placements(units, classes, pp, dp), most + 1))
        if len(every) <= most:
            return every, True
    return _likely_orders(units, pp, dp, message), False


def topology_order(units: Sequence[TensorParallelGroup], pp: int, dp: int) -> Placement:
    """Return the placement of the first pp × dp groups in their given order, replica by replica."""
    return _in_tiles(list(units)[: pp * dp], pp)


def rank_permutations(placement: Placement) -> Iterator[Placement]:
    """Yield the placements that differ from `placement` by one change of its pipeline ranks: their order reversed, or
    two ranks with unlike devices exchanged.

    The ends of a pipeline do more than their blocks, so it matters which devices are there.
    """
    pp = len(placement[0])
    figures = [tuple(row[rank].group_spec for row in placement) for rank in range(pp)]
    orders = [list(range(pp))[::-1]] if figures != figures[::-1] else []
    for a, b in combinations(range(pp), 2):
        if figures[a] != figures[b]:
            orders.append([{a: b, b: a}.get(rank, rank) for rank in range(pp)])
    for order in orders:
        yield Placement(tuple(row[rank] for rank in order) for row in placement)


def node_orders(placement: Placement) -> Iterator[Placement]:
    """Yield the placements whose nodes are in another order along the pipeline, by one change: nodes that follow each
    other in reversed order (2-opt, Croes 1958), or one at another position (Or 1976).

    Pipeline ranks that follow each other on the same node, in each replica, stay together in their order.
    """
    ranks = range(len(placement[0]))
    runs = [list(run) for _, run in groupby(ranks, lambda rank: [row[rank].node for row in placement])]
    reversals = (runs[:a] + runs[a:b][::-1] + runs[b:] for a, b in combinations(range(len(runs) + 1), 2) if b - a > 1)
    moves = (
        [*others[:to], run, *others[to:]]
        for at, run in enumerate(runs)
        for others in [runs[:at] + runs[at + 1 :]]
        for to in range(len(runs))
        if abs(to - at) > 1
    )
    for order in chain(reversals, moves):
        yield Placement(tuple(row[rank] for run in order for rank in run) for row in placement)


def staggered_replicas(placement: Placement) -> Iterator[Placement]:
    """Yield the placements in which replicas leave nodes at different pipeline ranks: the groups of every second
    replica are one rank later or earlier than in `placement`, or those of each replica one rank further than those of
    the replica before. What is moved beyond one end of the pipeline goes to the other end.

    If the replicas of a stage share a node and leave it at the same rank, their messages share its network card.
    """
    pp, dp = len(placement[0]), len(placement)
    for period in dict.fromkeys((2, dp)):
        for step in (1, -1):
            shifts = [step * (replica % period) % pp for replica in range(dp)]
            yield Placement(row[shift:] + row[:shift] for row, shift in zip(placement, shifts, strict=True))


def _sequences(classes: Sequence[int], size: int) -> float:
    """Return the number of sequences of `size` groups that differ in the classes of their groups.

    Sequences that differ only by an exchange of replicas count separately. The number is infinite if it exceeds a
    float.

    Args:
        classes: [group] -> its class.
    """
    unlike = len(set(classes))
    if unlike == 1:
        return 1.0
    if unlike == len(classes):
        return float(perm(unlike, min(size, MAX_DISTINCT_UNITS)))
    if size > MAX_COUNTED_SEQUENCE:
        return inf
    terms = [1.0] + [0.0] * size  # generating function: coefficient k · k! = number of sequences of length k
    for members in Counter(classes).values():
        terms = [
            sum(terms[k - taken] / factorial(taken) for taken in range(min(members, k) + 1)) for k in range(size + 1)
        ]
    return terms[size] * factorial(size)


def all_placements(
    units: Sequence[TensorParallelGroup], classes: Sequence[int], pp: int, dp: int
) -> Iterator[Placement]:
    """Yield all placements of pp × dp tensor-parallel groups that differ by more than an exchange of replicas or of
    groups of one class.

    Args:
        classes: [group] -> its class.
    """
    members: dict[int, list[TensorParallelGroup]] = {}
    for unit, number in zip(units, classes, strict=True):
        members.setdefault(number, []).append(unit)
    used = dict.fromkeys(members, 0)
    chosen: list[int] = []

    def extend() -> Iterator[Placement]:
        if len(chosen) == pp * dp:
            yield _with_members(chosen, members, pp)
            return
        for number, group in members.items():
            if used[number] == len(group):
                continue
            chosen.append(number)
            used[number] += 1
            if _replicas_in_order(chosen, pp):
                yield from extend()
            used[number] -= 1
            chosen.pop()

    if pp * dp <= len(units):
        yield from extend()


def count_placements(classes: Sequence[int], pp: int, dp: int) -> int:
    """Return an estimate of the number of placements that `all_placements` yields, at most this number.

    Args:
        classes: [group] -> its class.
    """
    sequences = _sequences(classes, pp * dp)
    return max(1, int(sequences) // factorial(dp)) if sequences < inf else MAX_COUNTED_PLACEMENTS


def _replicas_in_order(chosen: Sequence[int], pp: int) -> bool:
    """Return whether the classes in the last replica, as far as they are chosen, do not sort before the classes in the
    replica before it. Placements with replicas in another order are equal ones with replicas exchanged.

    Args:
        chosen: the class (`interchangeable_classes`) of each tensor-parallel group that is chosen so far: `pp` classes
            for each replica, replica by replica.
    """
    start = (len(chosen) - 1) // pp * pp
    return start == 0 or list(chosen[start:]) >= list(chosen[start - pp : start][: len(chosen) - start])


def _with_members(chosen: Sequence[int], members: dict[int, list[TensorParallelGroup]], pp: int) -> Placement:
    """Return the placement whose groups have the classes `chosen`. The groups of each class are taken in the order of
    `members`.

    Args:
        chosen: classes (`interchangeable_classes`) of the placement's tensor-parallel groups, `pp` for each replica,
            replica by replica.
        members: class -> its tensor-parallel groups.
    """
    waiting = {number: iter(group) for number, group in members.items()}
    return _in_tiles([next(waiting[number]) for number in chosen], pp)


def _likely_orders(
    units: Sequence[TensorParallelGroup],
    pp: int,
    dp: int,
    message: Callable[[TensorParallelGroup, TensorParallelGroup], float],
) -> list[Placement]:
    """Return placements of the pp·dp fastest groups, of those in the largest nodes and of the best connected ones. Each
    of these sets of groups is put into several orders, and `_in_tiles` makes a placement of each order with tiles of
    several widths.

    Args:
        message: seconds of a stage message between two groups.
    """
    size = pp * dp
    chosen = [sorted(units, key=lambda unit: (-unit.flops, unit.index))[:size]]
    sizes = Counter(unit.node for unit in units)
    if len(units) > size and len(set(sizes.values())) > 1:
        # Groups of equal speed are taken from large nodes, or large nodes come before fast ones.
        chosen = [sorted(units, key=lambda unit: (-unit.flops, -sizes[unit.node], unit.index))[:size]]
        chosen.append(sorted(units, key=lambda unit: (-sizes[unit.node], -unit.flops, unit.index))[:size])
    times = _between_nodes(units, message)
    if times:
        reach = {node: sum(row.values()) for node, row in times.items()}
        chosen.append(sorted(units, key=lambda unit: (reach[unit.node], unit.index))[:size])
    orders: dict[tuple[int, ...], list[TensorParallelGroup]] = {}
    for some in chosen:
        in_file_order = sorted(some, key=lambda unit: unit.index)
        for order in (some, in_file_order, _chain(in_file_order, times), _chain(some, times)):
            orders.setdefault(tuple(unit.index for unit in order), order)
    return distinct_placements(
        _in_tiles(order, pp, width) for width in _widths(units, pp, dp) for order in orders.values()
    )


def _widths(units: Sequence[TensorParallelGroup], pp: int, dp: int) -> list[int]:
    """Return the widths of tiles, in replicas, to try: all divisors of dp; for many groups only the likely ones. A tile
    is some replicas that take groups together, stage by stage (`_in_tiles`).

    The likely widths are dp (the groups of each stage follow each other), 1 (the groups of each pipeline do), as many
    replicas as have all their groups on one node, and as many as have the groups of one stage on one node.
    """
    every = [width for width in range(1, dp + 1) if dp % width == 0]
    if len(units) <= MAX_ORDERED_NODES:
        return every
    of_node = max(Counter(unit.node for unit in units).values())
    limits = (dp, 1, of_node // pp, of_node)
    return list(dict.fromkeys(max((width for width in every if width <= limit), default=1) for limit in limits))


def _between_nodes(
    units: Sequence[TensorParallelGroup], message: Callable[[TensorParallelGroup, TensorParallelGroup], float]
) -> dict[str, dict[str, float]]:
    """Return [node][other node] -> seconds of a stage message between them. The result is empty if all these times are
    equal, or if there are more than `MAX_ORDERED_NODES` nodes.

    Args:
        units: tensor-parallel groups; the first one of a node stands for the node.
        message: returns the seconds of a stage message from one group to another.
    """
    first: dict[str, TensorParallelGroup] = {}
    for unit in units:
        first.setdefault(unit.node, unit)
    if len(first) > MAX_ORDERED_NODES:
        return {}
    times = {a: {b: message(one, other) for b, other in first.items() if b != a} for a, one in first.items()}
    return times if len({seconds for row in times.values() for seconds in row.values()}) > 1 else {}


def _chain(units: Sequence[TensorParallelGroup], times: dict[str, dict[str, float]]) -> list[TensorParallelGroup]:
    """Return the groups node by node, from the node of the first group on.

    Each node is followed by the remaining node that its messages reach fastest.

    Args:
        times: [node][other node] -> seconds of a stage message; if empty, the order of the groups stays.
    """
    if not times:
        return list(units)
    members: dict[str, list[TensorParallelGroup]] = {}
    for unit in units:
        members.setdefault(unit.node, []).append(unit)
    nodes = nearest_chain(members, lambda a, b: times[a][b])
    return [unit for node in nodes for unit in members[node]]


def _in_tiles(order: Sequence[TensorParallelGroup], pp: int, width: int = 1) -> Placement:
    """Return the placement that fills `width` replicas (a tile) at a time, one pipeline rank after the other. A
    pipeline rank takes the next `width` groups of the order, one for each replica of the tile.

    With width 1, the groups of each pipeline follow each other in the order; with width dp, the groups of each stage
    do.
    """
    return Placement(
        tuple(order[start + rank * width + column] for rank in range(pp))
        for start in range(0, len(order), pp * width)
        for column in range(width)
    )


def placements_of_mixtures(
    classes: Sequence[Sequence[TensorParallelGroup]], mixtures: Sequence[Sequence[int]]
) -> list[Placement]:
    """Return one or two placements with the given numbers of groups of each class at each pipeline rank.

    Groups that follow each other in a class are neighbours. In the first placement, neighbours sum gradients together.
    In the second, which is left out if it is equal, neighbours send to each other. Every pipeline rank has its fast
    groups in the same replicas, so that as few replicas as possible wait for slow groups.

    Args:
        classes: tensor-parallel groups by class, the fastest class first.
        mixtures: [pipeline rank] -> number of groups of each class.
    """
    pp, dp = len(mixtures), sum(mixtures[0])
    kinds = [[kind for kind, number in enumerate(mixture) for _ in range(number)] for mixture in mixtures]
    by_column = [(replica, rank) for rank in range(pp) for replica in range(dp)]
    placements = []
    for order in (by_column, sorted(by_column)):
        waiting = [iter(units) for units in classes]
        rows: list[dict[int, TensorParallelGroup]] = [{} for _ in range(dp)]
        for replica, rank in order:
            rows[replica][rank] = next(waiting[kinds[rank][replica]])
        placements.append(Placement(tuple(row[rank] for rank in range(pp)) for row in rows))
    return distinct_placements(placements)
