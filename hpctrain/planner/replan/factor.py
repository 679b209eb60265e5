"""Finds factors on predicted times from measured ones."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.records.plan.profile import LARGEST_FACTOR, LEAST_FACTOR

TOLERANCE = 1e-6
"""Largest relative error of a factor that root finding returns."""
MIN_COMPUTE_SHARE = 0.5
"""Least share of computation in a predicted step that gives a factor on the time of computation: with less, most of a
deviation is likely one of messages."""


def compute_factor(step_s: Callable[[float], float], measured_s: float) -> tuple[float | None, str]:
    """Return the factor on the time of computation that best explains how long a whole measured step took, and a
    remark. The factor is None, and the remark says why, if computation takes too little of the step. A factor outside
    `LEAST_FACTOR` to `LARGEST_FACTOR` is set to the nearer limit, and the remark says so; otherwise the remark is
    empty.

    With the share c of computation in the step, a factor F on computation and a factor G on all else explain the
    measured step if c·ln F + (1−c)·ln G is the logarithm of measured by predicted time. Both are equally likely to be
    wrong, so the two with the least (ln F)² + (ln G)² are the most likely. With them, computation explains
    c²/(c² + (1−c)²) of that logarithm.

    The factor holds for a type of device, so it corrects predictions of other models and plans on such devices, too.

    Args:
        step_s: predicted seconds of the step as a function of the factor; the function never falls.
        measured_s: measured seconds of the step.
    """
    whole_s = step_s(1.0)
    share = (whole_s - step_s(LEAST_FACTOR)) / ((1 - LEAST_FACTOR) * whole_s)
    if share < MIN_COMPUTE_SHARE:
        return None, "computation took too little of these steps"
    explained = share**2 / (share**2 + (1 - share) ** 2)
    return solve_factor(step_s, whole_s * (measured_s / whole_s) ** explained)


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
