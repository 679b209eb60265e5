"""The limits of a search: how many options, placements and changes it tries, and how exact its bounds are."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class SearchLimits:
    """Where a search stops trying; larger numbers take longer and may find a faster plan.

    An option is a choice of degrees, schedule and micro-batch size. A full evaluation tries all likely placements of an
    option, a sampled one only a few of them.
    """

    best_first_work: tuple[tuple[float, int], ...] = ((16, 350), (32, 160), (inf, 20))
    """(largest number of devices, work in checks of a knapsack bound) after which a search on at most
    `EXHAUSTIVE_DEVICES` devices (`planner/search/space.py`) no longer goes by the bounds, and searches near the best
    options instead.
    """
    first_options: int = 80
    """Largest number of options, of degrees from the whole range, with which the search near the best options begins.
    """
    patience_by_devices: tuple[tuple[float, int], ...] = ((2048, 3), (inf, 2))
    """(largest number of devices, patience) for searches on more than `EXHAUSTIVE_DEVICES` devices: the number of
    options in a row without a better plan after which the search in the order of the bounds leaves a pair of pp and tp.
    Each pair has a patience of its own, because bounds are not equally tight for all pairs."""
    replan_evaluations: int = 16
    """Largest number of options that a search on more than `EXHAUSTIVE_DEVICES` devices evaluates in the order of the
    bounds, for a plan that replaces another one."""
    replan_patience: int = 1
    """Patience (see `patience_by_devices`) of a search for a plan that replaces another one."""
    first_options_of_size: int = 2
    """On more than `EXHAUSTIVE_DEVICES` devices, the number of degrees, for each tp, with which the search begins for
    plans on 1, on 2 and 3, on 4 to 7 devices and so on, in place of `first_options`."""
    neighbour_options: tuple[tuple[float, int], ...] = ((64, 300), (512, 80), (2048, 60), (inf, 30))
    """(largest number of devices, largest number of options that the search near the best options evaluates after the
    first ones). On at most `EXHAUSTIVE_DEVICES` devices, an option counts once for every `MAX_SAMPLED_UNITS`
    (`planner/search/option_search.py`) tensor-parallel groups in its placements."""
    replan_options: tuple[tuple[float, int], ...] = ((64, 140), (512, 12), (2048, 20), (inf, 12))
    """The same as `neighbour_options`, for a plan that replaces another one."""
    least_sampled: tuple[tuple[float, int], ...] = ((512, 3), (inf, 2))
    """(largest number of devices, fewest placements of an option that the search near the best options compares, if
    there are so many)."""
    full_evaluations: int = 12
    """Number of options near the best that get a full evaluation."""
    full_evaluations_of_many: int = 2
    """Number of fast options that get a full evaluation on more than `EXHAUSTIVE_DEVICES` devices."""
    full_placements: int = 36
    """Largest number of placements in each of the full evaluations that `full_evaluations` counts."""
    annealed_options: int = 12
    """Number of layouts that are annealed in the first round, each the fastest with its degrees and number of stages;
    each further round has half as many."""
    annealing_work: float = 9_000
    """Work of each round of annealing, in the end, as `hpctrain.planner.search.layout_search.anneal` counts it."""
    short_annealing: int = 2
    """Number by which `annealing_work` is divided where the bounds have excluded all other options."""
    annealing_slowdown: float = 0.02
    """Largest share by which the first changes of an annealing may make the step longer."""
    max_skipped_bounds: tuple[tuple[float, int], ...] = ((32, 100), (inf, 20))
    """(largest number of devices, largest number of skipped options and of micro-batch sizes whose bounds are computed
    more exactly in the end)."""
    first_full_evaluations: int = 3
    """Number of options at the start of a search that get a full evaluation right after their sampled one. On unlike
    devices a sampled evaluation gives no plan that is good enough for pruning.
    """
    sampled_placements: int = 2
    """Placements of an option in a sampled evaluation. The best option of the search gets a full evaluation in the end.
    """
    near_best_factor: float = 1.1
    """Largest step time of a layout "near the best", as a multiple of the best step time. Only layouts near the best
    are improved by local search.
    """
    improvable_factor: float = 1.3
    """Largest step time of a plan for a part of the devices that still gets local search, as a multiple of the best
    step time; for parts of at most `EXHAUSTIVE_DEVICES` devices. On a slow network, local search shortened the step of
    such a plan by a fifth.
    """
    max_block_shifts: int = 100
    """Number of tried changes of one block or micro-batch of a layout near the best after which no further round of
    changes begins."""
    max_halved_devices: int = 512
    """Largest number of devices of a pool whose halves are searched, too, and whose search begins with ZeRO, too."""
    max_part_devices: int = 1024
    """Largest number of devices of a part of a pool, such as the nodes of one kind, that is searched, too."""
    max_packed_devices: int = 512
    """Largest number of devices of a pool on which stages and pipelines are packed within nodes."""
    max_packed_layouts: int = 16
    """Number of layouts near the best that are tried with stages or pipelines packed within nodes, at the end of the
    search.
    """

    least_send_share: float = 0.15
    """Smallest share of the best plan's step that stage messages must take; if they take less, no layouts with
    staggered replicas are tried."""

    max_compared_units: int = 64
    """Largest number of tensor-parallel groups whose links are compared pair by pair, to find groups that are
    interchangeable.
    """
    max_replica_counts: int = 2
    """Largest number of values of dp that a warm start tries besides that of the previous plan, the largest values
    first."""
    max_exact_devices: int = 8
    """Largest number of devices that the solver `exact` accepts."""
    max_exact_layouts: int = 200_000
    """Largest number of placements, cuts and divisions of the batch, over all options that can win, that the solver
    `exact` tries."""

    max_rank_permutations: int = 20
    """Largest number of permutations of the best layout's pipeline ranks to try, and of orders of its nodes, in a round
    of local search."""
    max_permuted_units: int = 12_500
    """Largest number of tensor-parallel groups in all tried permutations together, because a permutation of very many
    groups takes long.
    """
    max_paired_stages: tuple[tuple[float, int], ...] = ((64, 24), (inf, 16))
    """(largest number of devices, largest number of stages between any two of which local search moves blocks); with
    more stages, blocks move between neighbours and within pipeline ranks."""
    max_refinements: int = 400
    """Number of tried changes of one block or micro-batch of the search's best plan after which no further round of
    changes begins."""
    least_gain: float = 1e-3
    """Share of the step time by which a round of local search has to shorten the best plan's step, or it is the last
    round."""
    max_move_slowdown: float = 0.01
    """Largest share of the step time that a new plan may lose in exchange for fewer moves of state from the old plan's
    devices.
    """
    max_seam_slowdown: float = 0.02
    """Largest share of the step time that a cut between encoder and decoder (the seam) may cost. It is less than the
    error of a prediction.
    """

    max_other_dims: int = 6
    """Largest number of other degrees that are compared with the best plan's degrees, those with the smallest bound
    first."""
    compared_placements: tuple[tuple[float, int], ...] = ((8, 10_000), (64, 2), (inf, 1))
    """(largest number of devices, placements of each option of other degrees that are compared)."""
    other_dims_patience: int = 2
    """Number of options without a better plan after which other degrees are compared no further, for each choice of
    degrees.
    """
    max_impossible: int = 3
    """Largest number of impossible degrees that a plan lists."""
    max_rejected: int = 12
    """Largest number of rejected candidates that a plan lists if its objective is not step time."""
    max_removed_nodes: int = 4
    """Largest number of nodes that are left out, one at a time, to explain a plan. Each node takes a search."""

    bound_tolerance: float = 1e-3
    """Width of the interval at which the bisection for a bound ends, as a share of the interval's upper end."""
    max_doublings: int = 12
    """Number of step times that a bound tries in search of a feasible one; each is twice as long as the one before."""
    max_windows: int = 10
    """Largest number of windows of a knapsack bound. A window is a range of values of the largest number of
    micro-batches of any replica.
    """
    max_classes: int = 3
    """Largest number of classes into which a bound merges the kinds of tensor-parallel groups."""
    max_mixtures: int = 200
    """Largest number of mixtures of a knapsack bound. A mixture says how many groups of each class one pipeline rank
    has over all replicas. Kinds are merged into fewer classes until there are at most this number of mixtures.
    """


DEFAULT_LIMITS = SearchLimits()


def limit_of(limits: tuple[tuple[float, int], ...], devices: int) -> int:
    """Return the limit that holds for a number of devices.

    Args:
        limits: (largest number of devices, limit), the smallest number first.
    """
    return next(limit for most_devices, limit in limits if devices <= most_devices)
