"""Finds the factor on predicted times at which a prediction equals a measurement."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.records.plan.profile import LARGEST_FACTOR, LEAST_FACTOR

TOLERANCE = 1e-6
"""Largest relative error of a factor that root finding returns."""
MIN_COMPUTE_SHARE = 0.5
"""Least share of computation in a predicted step that gives a factor on the time of computation: with less, errors of
messages would be taken for those of computation."""


def compute_factor(step_s: Callable[[float], float], measured_s: float) -> tuple[float | None, str]:
    """Return the factor on the time of computation at which a whole predicted step takes as long as a measured one, and
    a remark. The factor is None, and the remark says why, if computation takes too little of the step. A factor outside
    `LEAST_FACTOR` to `LARGEST_FACTOR` is set to the nearer limit, and the remark says so; otherwise the remark is
    empty.

    The factor holds for a type of device, so it corrects predictions of other models and plans on such devices, too.

    Args:
        step_s: predicted seconds of the step as a function of the factor; the function never falls.
        measured_s: measured seconds of the step.
    """
    whole_s = step_s(1.0)
    if whole_s - step_s(LEAST_FACTOR) < MIN_COMPUTE_SHARE * (1 - LEAST_FACTOR) * whole_s:
        return None, "computation took too little of these steps"
    return solve_factor(step_s, measured_s)


def solve_factor(predicted: Callable[[float], float], measured: float) -> tuple[float, str]:
    """Return the factor at which the prediction equals the measurement, and a remark. A factor outside `LEAST_FACTOR`
    to `LARGEST_FACTOR` is set to the nearer limit, and the remark says so; otherwise the remark is empty.

    Args:
        predicted: predicted seconds as a function of the factor; the function never falls.
        measured: measured seconds.
    """
    low, high = LEAST_FACTOR, LARGEST_FACTOR
    for end, missed in ((low, predicted(low) >= measured), (high, predicted(high) <= measured)):
        if missed:
            return end, f"limited to {end:g}: the steps were {'faster' if end == low else 'slower'} still"
    from scipy.optimize import brentq  # imported here, because loading it takes longer than most searches

    return float(brentq(lambda factor: predicted(factor) - measured, low, high, rtol=TOLERANCE)), ""
