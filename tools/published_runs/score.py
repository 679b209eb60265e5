"""Scores predicted step times of published runs: errors by problem, ranking of plans, and regret of the plan that is
ranked first. A problem is a group of similar runs (`MeasuredRun.problem`), a search a group of plans for the same
work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from hpctrain.bench.comparison import Errors, errors_of
from tools.published_runs.scenario import PublishedScenario
from tools.published_runs.table import MeasuredRun

LEAST_PLANS = 5
"""Fewest plans of a search for its ranking to count."""

TIE = 1e-9
"""Relative difference below which two predicted times are equal."""


@dataclass(frozen=True)
class Ranking:
    """How well predicted step times rank the plans of one or several searches."""

    searches: int
    """Number of searches."""
    rank_correlation: float
    """Spearman's correlation of predicted and measured times, mean over the searches."""
    regret_pct: float
    """How much slower, in percent, the plan predicted to be fastest was than the plan measured to be fastest
    (average over plans with the same prediction); mean over the searches."""
    largest_regret_pct: float
    """The largest regret of a search, in percent."""


def by_problem(scenes: Sequence[PublishedScenario]) -> dict[str, list[PublishedScenario]]:
    """Return problem -> its scenarios, in order of appearance."""
    groups: dict[str, list[PublishedScenario]] = {}
    for scene in scenes:
        groups.setdefault(scene.run.problem, []).append(scene)
    return groups


def time_errors(scenes: Sequence[PublishedScenario], predicted: Mapping[str, float]) -> dict[str, Errors]:
    """Return problem -> errors of its predicted step times. Failed runs have no time and are left out.

    Args:
        predicted: run id -> predicted seconds of a step.
    """
    found = {}
    for problem, same in by_problem(scenes).items():
        pairs = [(predicted[scene.run.id], scene.run.step_s) for scene in same if scene.run.step_s is not None]
        if pairs:
            found[problem] = errors_of([a for a, _ in pairs], [b for _, b in pairs])
    return found


def rankings(scenes: Sequence[PublishedScenario], predicted: Mapping[str, float]) -> dict[str, Ranking]:
    """Return problem -> ranking over its searches with at least `LEAST_PLANS` plans that ran.

    Args:
        predicted: run id -> predicted seconds of a step.
    """
    found = {}
    for problem, same in by_problem(scenes).items():
        searches: dict[tuple[object, ...], list[MeasuredRun]] = {}
        for scene in same:
            if scene.run.step_s is not None:
                searches.setdefault(scene.run.search, []).append(scene.run)
        scored = [_rank(runs, lambda run: predicted[run.id]) for runs in searches.values() if len(runs) >= LEAST_PLANS]
        if scored:
            found[problem] = Ranking(
                len(scored),
                float(np.mean([correlation for correlation, _ in scored])),
                float(np.mean([regret for _, regret in scored])),
                max(regret for _, regret in scored),
            )
    return found


def _rank(runs: Sequence[MeasuredRun], seconds: Callable[[MeasuredRun], float]) -> tuple[float, float]:
    """Return (Spearman's correlation, regret in percent) for the plans of one search.

    Args:
        seconds: run -> predicted seconds of a step.
    """
    measured = [run.step_s or 0.0 for run in runs]
    told = [seconds(run) for run in runs]
    chosen = [
        took for took, expected in zip(measured, told, strict=True) if expected <= min(told) + TIE * abs(min(told))
    ]
    # Equal predictions rank nothing, which counts as a correlation of 0.
    same = len(set(told)) == 1 or len(set(measured)) == 1
    correlation = 0.0 if same else float(spearmanr(told, measured).statistic)
    return correlation, 100 * (float(np.mean(chosen)) / min(measured) - 1)


def bubble_only(scene: PublishedScenario) -> float:
    """Return a number in proportion to the step time by a simple baseline: model FLOPs of a GPU times 1 + (pp −
    1)/(v·m), which is the bubble of 1F1B with v virtual stages and m micro-batches."""
    run, work = scene.run, scene.work
    flops = work.spec.forward_flops(run.rows, run.seq_len)
    count = run.rows / run.dp / run.micro_batch
    return flops / run.num_gpus * (1 + (run.pp - 1) / run.chunks / count)


def baseline(scenes: Sequence[PublishedScenario]) -> dict[str, float]:
    """Return run id -> seconds of a step by `bubble_only`, with the rate that fits each problem best. The rate is
    fitted on the runs that it then predicts, so the baseline looks better than it is."""
    found = {}
    for same in by_problem(scenes).values():
        ratios = [scene.run.step_s / bubble_only(scene) for scene in same if scene.run.step_s is not None]
        rate = float(np.median(ratios)) if ratios else 1.0
        found.update({scene.run.id: rate * bubble_only(scene) for scene in same})
    return found
