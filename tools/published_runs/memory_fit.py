"""Fits the two figures of memory that no source states, the bytes of a process and the share of gaps, to some of
BigScience's runs, and predicts the peaks of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.published_runs.scenario import PublishedScenario

HIGHEST = 1.15
"""Goal of a prediction: not below the measured peak, and at most so many times as high."""
PROCESS_BYTES = np.arange(15, 71) * 1e8
"""Bytes of a process that a fit tries."""
GAP_SHARES = np.arange(10, 71) / 100
"""Shares of gaps that a fit tries."""
HALVES = 1000
"""Random halves of the runs that are fitted, each to predict the other half."""


def fit_memory(ratios: NDArray[np.float64]) -> tuple[int, int]:
    """Return the indices in `PROCESS_BYTES` and `GAP_SHARES` whose predictions are closest to the middle of the goal,
    judged by the worst run.

    Args:
        ratios: predicted peak divided by the measured one, of shape [process, share, run].
    """
    distance = np.abs(np.log(ratios) - np.log(HIGHEST) / 2).max(axis=2)
    process, share = np.unravel_index(int(distance.argmin()), distance.shape)
    return int(process), int(share)


def memory_fits(scenes: Sequence[PublishedScenario]) -> dict[str, Any] | None:
    """Return the record of fits to some runs and of the predictions for the other ones; None without BigScience's runs
    in fp16 and in bf16.

    Returns:
        `fits`: one for each part of the runs, `halves_in_goal`: share of `HALVES` random halves after whose fit all
        runs of the other half meet the goal.
    """
    chosen = [scene for scene in scenes if scene.run.family == "BigScience" and scene.run.peak_bytes is not None]
    bf16 = np.array([scene.run.bf16 for scene in chosen], dtype=bool)
    if bf16.all() or not bf16.any():
        return None
    ratios = _ratios(chosen)
    deep = np.array([scene.run.pp >= 10 for scene in chosen])
    wide = np.array([scene.run.hidden == 14336 for scene in chosen])
    parts = {
        "fp16": ~bf16, "bf16": bf16, "10 stages or more": deep, "fewer stages": ~deep, "width 14336": wide,
        "other widths": ~wide,
    }  # fmt: skip
    fits = {name: _fit(ratios, part) for name, part in parts.items() if part.any() and not part.all()}
    rng, half = np.random.default_rng(0), np.arange(len(chosen)) < len(chosen) // 2
    found = [_fit(ratios, rng.permutation(half)) for _ in range(HALVES)]
    within = [each["lowest_pct"] >= 0 and each["highest_pct"] <= 100 * (HIGHEST - 1) for each in found]
    return {"fits": fits, "halves_in_goal": float(np.mean(within))}


def _fit(ratios: NDArray[np.float64], part: NDArray[np.bool_]) -> dict[str, float]:
    """Return the figures fitted to the runs in `part`, and the errors in percent of the lowest and of the highest
    prediction for the others."""
    process, share = fit_memory(ratios[:, :, part])
    others = 100 * (ratios[process, share, ~part] - 1)
    return {
        "process_gb": PROCESS_BYTES[process] / 1e9, "gap_share": float(GAP_SHARES[share]), "others": int((~part).sum()),
        "lowest_pct": float(others.min()), "highest_pct": float(others.max()),
    }  # fmt: skip


def _ratios(scenes: Sequence[PublishedScenario]) -> NDArray[np.float64]:
    """Return predicted peak divided by the measured one, of shape [process, share, run]."""
    tensors = np.array([scene.peak_bytes(0.0, 0.0) for scene in scenes])
    leaving_gaps = np.array([scene.peak_bytes(0.0, 1.0) for scene in scenes]) - tensors
    device = np.array([scene.device_bytes for scene in scenes])
    measured = np.array([scene.run.peak_bytes for scene in scenes], dtype=float)
    least = tensors + PROCESS_BYTES[:, None, None]
    peaks = np.maximum(least, np.minimum(least + GAP_SHARES[:, None] * leaving_gaps, device))
    return np.asarray(peaks / measured)
