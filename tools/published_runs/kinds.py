"""Errors of whole kinds of runs that a fit did not see: without any measured step, and with one measured step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hpctrain.bench.comparison import errors_of
from hpctrain.planner.devices.constants import CostConstants
from hpctrain.planner.replan.factor import compute_factor
from tools.published_runs.fit import without_kind
from tools.published_runs.scenario import PublishedScenario

MOST_STEPS = 8
"""Most runs of a kind of which each gives a factor once, evenly spaced in the table."""


@dataclass(frozen=True)
class KindErrors:
    """Mean absolute errors, in percent of the measured step, of runs whose whole kind was left out of the fit."""

    runs: int
    free: float
    """Without any measured step of the kind."""
    bias: float
    """Mean signed error without any measured step; above 0, predictions are too long."""
    one_step: float
    """With a factor on the time of computation from one measured step: mean over the steps that gave the factor. NaN if
    the kind mixes types of devices, or if no step of it gives a factor (`compute_factor`)."""
    worst_step: float
    """The same with the step that gave the worst factor."""


def kind_errors(
    scenes: Sequence[PublishedScenario], progress: Callable[[str], None]
) -> tuple[dict[str, KindErrors], dict[str, tuple[float | None, float | None]], dict[str, float]]:
    """Return (kind of runs -> errors, problem -> its mean errors in percent (without any step, with one step), run id
    -> measured step divided by the one predicted without any step). Layer times that a publication measured are not
    used.

    Args:
        progress: called with a text about each fit.
    """
    measured = [replace(scene, profile=None) for scene in scenes if scene.run.step_s is not None]
    kinds: dict[str, KindErrors] = {}
    problems: dict[str, tuple[float | None, float | None]] = {}
    ratios: dict[str, float] = {}
    for kind in dict.fromkeys(scene.run.kind for scene in measured):
        same = [scene for scene in measured if scene.run.kind == kind]
        constants = without_kind(measured, kind, progress)
        free = _errors(same, constants, 1.0)
        ratios |= {scene.run.id: 1 / (1 + error / 100) for scene, error in zip(same, free.tolist(), strict=True)}
        rows = []
        for index in range(0, len(same), -(-len(same) // MOST_STEPS)):
            factor = None if same[index].run.mixed else _factor(same[index], constants)
            if factor is not None and len(same) > 1:
                rows.append(np.abs(_errors(same, constants, factor)))
                rows[-1][index] = np.nan  # a run does not judge its own factor
        by_step = np.array(rows) if rows else np.full((1, len(same)), np.nan)
        found, steps = errors_of(list(1 + free / 100), [1.0] * len(same)), [_mean(row) for row in by_step]
        kinds[kind] = KindErrors(found.runs, found.mean, found.bias, _mean(np.array(steps)), max(steps))
        for problem in dict.fromkeys(scene.run.problem for scene in same):
            of = [scene.run.problem == problem for scene in same]
            problems[problem] = (_known(_mean(np.abs(free[of]))), _known(_mean(by_step[:, of])))
    return kinds, problems, ratios


def _mean(values: np.ndarray) -> float:
    """Return the mean of the numbers that are not NaN; NaN if there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def summary(kinds: dict[str, KindErrors]) -> dict[str, Any]:
    """Return the record of `kind_errors`: each kind's errors, and median and worst over the kinds. Figures that are not
    known are None."""
    by_kind = {kind: {name: _known(value) for name, value in asdict(each).items()} for kind, each in kinds.items()}
    record: dict[str, Any] = {"by_kind": by_kind}
    for name in ("free", "one_step"):
        values = [value for each in by_kind.values() if (value := each[name]) is not None]
        record[name] = {"median": float(np.median(values)), "worst": max(values)} if values else None
    return record


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _factor(scene: PublishedScenario, constants: CostConstants) -> float | None:
    factor, _ = compute_factor(lambda factor: scene.slower(factor).step_s(constants), scene.run.step_s or 0.0)
    return factor


def _errors(scenes: Sequence[PublishedScenario], constants: CostConstants, factor: float) -> np.ndarray:
    """Return the signed errors of the scenarios in percent, with computation that takes `factor` times as long."""
    predicted = np.array([scene.slower(factor).step_s(constants) for scene in scenes])
    return 100 * (predicted / np.array([scene.run.step_s for scene in scenes]) - 1)
