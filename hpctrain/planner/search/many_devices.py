"""Best-first search over many devices: options in order of bounds, with separate patience for each pair of pp and
tp.
"""

from __future__ import annotations

import math
from collections import Counter

from hpctrain.planner.search.candidates import Candidate, UnopenedCandidate
from hpctrain.planner.search.state import SearchResult, SearchState


def search_many_devices(state: SearchState) -> SearchResult:
    """Search the queued candidates until none can win or patience has run out for all of them; return the best plan."""
    candidates, misfit_factor = state.candidates, state.limits.misfit_factor
    patience = misfit_factor * _patience(state)
    lowest, ended = math.inf, True
    used_patience: Counter[tuple[int, int]] = Counter()
    while candidates.queue and state.can_win(candidates.queue[0]):
        candidate = candidates.pop()
        pp, _, tp = candidate.dims
        if state.best is not None and used_patience[pp, tp] >= patience:
            lowest, ended = min(lowest, candidate.bound_s), False
            continue
        if isinstance(candidate, UnopenedCandidate):
            candidates.open(candidate, state.best)
            continue
        fits = _may_fit(candidate)
        if fits:
            before = state.best
            fits = state.evaluate_sampled(candidate.space, candidate.option).fits
            lowest = min(lowest, candidate.bound_s)
            used_patience[pp, tp] += misfit_factor if fits else 1
            if state.best is not before:
                used_patience[pp, tp] = 0
        if not fits:
            candidates.push_leaner_options(candidate)
    if candidates.queue:
        lowest = min(lowest, candidates.queue[0].bound_s)
    state.try_variants_of_best(sampled=True)
    return state.result(lowest, ended)


def _patience(state: SearchState) -> int:
    limits, devices = state.limits, len(state.plain.pool.devices)
    if state.best is not None:
        return limits.warm_start_patience
    return next((options for limit, options in limits.patience_by_devices if devices <= limit), limits.min_patience)


def _may_fit(candidate: Candidate) -> bool:
    bounds, option = candidate.space.bounds, candidate.option
    return not bounds.is_too_large(option) and bounds.may_fit(option)  # the condition that is cheapest to compute first
