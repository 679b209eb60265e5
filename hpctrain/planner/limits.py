"""The limits of a search: how many options, placements and changes it tries, and how exact its bounds are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchLimits:
    """Where a search stops trying; larger numbers take longer and may find a faster plan.

    An option is a choice of degrees, schedule and micro-batch size. A full evaluation tries all likely placements of an
    option, a sampled one only a few of them.
    """

    complete_search_devices: int = 8
    """Largest number of devices for which the search ends only when no other option can win."""
    first_full_evaluations: int = 10
    """Number of options that are evaluated fully at once. On unlike devices a sampled evaluation gives no plan that is
    good enough for pruning.
    """
    sampled_placements: int = 2
    """Placements of an option in a sampled evaluation; the best option gets all of its placements evaluated in the
    end.
    """
    full_patience: int = 64
    """Number of full evaluations without a better plan after which a search skips the remaining options.

    It applies up to `EXHAUSTIVE_DEVICES` devices.
    """
    near_best_factor: float = 1.1
    """Largest step time of an option "near the best", as a multiple of the best step time. Local changes may improve
    it.
    """
    max_block_shifts: int = 100
    """Changes of single blocks that are tried on an option near the best."""
    max_packed_layouts: int = 16
    """Number of layouts near the best that are tried with stages or pipelines packed within nodes, at the end of the
    search.
    """

    patience_by_devices: tuple[tuple[int, int], ...] = ((512, 3), (2048, 5))
    """(largest number of devices, patience) for searches on more than `EXHAUSTIVE_DEVICES` devices.

    The search leaves a pair of pp and tp after that many options without a better plan. Each pair has a patience of its
    own, because bounds are not equally tight for all pairs.
    """
    min_patience: int = 2
    """Patience of a search on more devices than `patience_by_devices` lists."""
    warm_start_patience: int = 1
    """Patience of a search with a warm start."""
    misfit_factor: int = 3
    """An option that does not fit the memory uses up this many times less patience than one that fits."""

    max_compared_units: int = 64
    """Largest number of tensor-parallel groups whose links are compared pair by pair."""
    max_replica_counts: int = 2
    """Numbers of replicas that a warm start tries, the largest first."""
    max_exact_devices: int = 8
    """The most devices of an exhaustive search."""
    max_exact_cuts: int = 20_000
    """Largest number of cuts times splits of the batch that an exhaustive search tries for one order of devices."""

    max_rank_permutations: int = 60
    """Permutations of the best layout's pipeline ranks that are tried."""
    max_permuted_units: int = 50_000
    """Largest number of tensor-parallel groups in all tried permutations together: with very many devices each takes
    long.
    """
    max_refinements: int = 400
    """Number of changes of one block or micro-batch after which no further round of changes begins."""
    max_move_slowdown: float = 0.01
    """Share of a step's time that keeping state in place may cost."""
    max_seam_slowdown: float = 0.02
    """Share of a step's time that a cut at the model's seam may cost; it is less than the error of a prediction."""

    max_other_dims: int = 6
    """Number of other degrees that are compared with the best plan's degrees, those with the smallest bound first."""
    other_dims_patience: int = 2
    """Number of options without a better plan after which the comparison with other degrees ends."""
    max_impossible: int = 3
    """Impossible degrees that a plan lists."""
    max_rejected: int = 12
    """Largest number of rejected candidates that a plan lists if its objective is not step time."""
    max_removed_nodes: int = 4
    """Number of nodes that are left out, one at a time, to explain a plan; each takes a search."""

    bound_tolerance: float = 1e-3
    """Relative width at which the bisection for a bound ends."""
    max_doublings: int = 12
    """Largest number of times that a bound is doubled in search of a feasible time."""
    max_windows: int = 10
    """Number of ranges into which a bound divides the largest number of micro-batches of any replica."""
    max_classes: int = 3
    """Largest number of classes into which a bound merges the kinds of tensor-parallel groups."""
    max_mixtures: int = 200
    """Largest number of mixtures of classes in a column; kinds are merged into fewer classes until there are at most so
    many.
    """
    max_cut_classes: int = 2
    """Largest number of classes with which a bound enumerates all cuts of the blocks."""
    max_mixes: int = 256
    """Largest number of mixes (choices of a class for each rank of a replica) with which a bound enumerates all
    cuts.
    """
    max_cut_mixes: int = 30_000
    """Largest number of pairs of a cut and a mix that a bound enumerates."""
    max_end_ranks: int = 3
    """Number of ranks at each end of the pipeline at which the sets of weights for interleaved 1F1B may begin or
    end.
    """
    cuts_per_batch: int = 100
    """Number of cuts that a bound evaluates in one batch."""


DEFAULT_LIMITS = SearchLimits()
