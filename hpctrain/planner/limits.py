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
    """Up to this many devices, the search ends only when no option can win."""
    first_full_evaluations: int = 10
    """The first options are evaluated fully at once: on unlike devices a sampled evaluation gives no plan that is good
    enough for pruning."""
    sampled_placements: int = 2
    """Placements in a sampled evaluation; the best option gets all of its placements evaluated in the end."""
    full_patience: int = 64
    """Full evaluations without a better plan after which a search on up to `EXHAUSTIVE_DEVICES` devices skips the
    rest."""
    near_best_factor: float = 1.1
    """An option is near the best if it takes at most this many times as long; local changes may then help."""
    max_block_shifts: int = 100
    """Changes of single blocks that are tried on an option near the best."""
    max_packed_layouts: int = 16
    """Layouts near the best that are tried with stages or pipelines packed within nodes, at the end of the search."""

    patience_by_devices: tuple[tuple[int, int], ...] = ((512, 3), (2048, 5))
    """(largest number of devices, patience) on more than `EXHAUSTIVE_DEVICES` devices. The search leaves a pair of pp
    and tp after that many options without a better plan: bounds are not equally tight for all pairs."""
    min_patience: int = 2
    """The patience on still more devices."""
    warm_start_patience: int = 1
    """The patience with a warm start."""
    misfit_factor: int = 3
    """An option that does not fit uses up this many times less patience than one that fits."""

    max_compared_units: int = 64
    """Up to this many tensor-parallel groups, links are compared pair by pair."""
    max_replica_counts: int = 2
    """Numbers of replicas that a warm start tries, the largest first."""
    max_exact_devices: int = 8
    """The most devices of an exhaustive search."""
    max_exact_cuts: int = 20_000
    """Cuts times splits of the batch that an exhaustive search tries for one order of devices."""

    max_rank_permutations: int = 60
    """Permutations of the best layout's pipeline ranks that are tried."""
    max_permuted_units: int = 50_000
    """Tensor-parallel groups in all these permutations together: on very many devices each one takes long."""
    max_refinements: int = 400
    """Changes of one block or micro-batch after which no further round of changes is begun."""
    max_move_slowdown: float = 0.01
    """Share of a step's time that keeping state in place may cost."""
    max_seam_slowdown: float = 0.02
    """Share of a step's time that a cut at the model's seam may cost; less than the error of a prediction."""

    max_other_dims: int = 6
    """Other degrees that are compared with the best plan's, the smallest bound first."""
    other_dims_patience: int = 2
    """Options tried for other degrees after their best so far."""
    max_impossible: int = 3
    """Impossible degrees that a plan lists."""
    max_rejected: int = 12
    """Rejected candidates that a plan lists if it is not chosen by time."""
    max_removed_nodes: int = 4
    """Nodes that are left out, one at a time, to explain a plan; each takes a search."""

    bound_tolerance: float = 1e-3
    """Relative width at which the bisection for a bound ends."""
    max_doublings: int = 12
    """How often a bound is doubled in search of a feasible time."""
    max_windows: int = 10
    """Ranges into which a bound divides the largest number of micro-batches of any replica."""
    max_classes: int = 3
    """Classes that a bound tells apart among the kinds of tensor-parallel groups."""
    max_mixtures: int = 200
    """Mixtures of classes in a column; kinds are merged into fewer classes until it holds."""
    max_cut_classes: int = 2
    """Classes up to which a bound enumerates all cuts of the blocks."""
    max_mixes: int = 256
    """Choices of classes for the ranks of a replica up to which a bound enumerates all cuts."""
    max_cut_mixes: int = 30_000
    """Pairs of a cut and such a choice up to which a bound enumerates them."""
    max_end_ranks: int = 3
    """Ranks at each end of the pipeline at which the sets of weights for interleaved 1F1B begin or end."""
    cuts_per_batch: int = 100
    """Cuts that are evaluated in one batch."""


DEFAULT_LIMITS = SearchLimits()
