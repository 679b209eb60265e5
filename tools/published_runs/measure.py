"""Compares the planner's predictions with published runs.

Errors and rankings are out of sample: a run that the packaged constants were fitted on is predicted with constants
that were fitted without its whole problem. Results with the packaged constants are printed separately.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.base.errors import InputError
from hpctrain.bench.comparison import Errors, errors_of
from hpctrain.bench.record import machine_and_versions
from tools.published_runs.data_sheets import gpu_of
from tools.published_runs.fit import held_out, packaged, was_fitted
from tools.published_runs.kinds import kind_errors, summary
from tools.published_runs.memory_fit import memory_fits
from tools.published_runs.sailor import FOLDER, read_figures
from tools.published_runs.scenario import PublishedScenario, scenes_of
from tools.published_runs.score import baseline, by_problem, rankings, time_errors
from tools.published_runs.table import read_tables
from tools.published_runs.utilization import weighted_quantiles

FILES = "measured_runs*.csv"
"""Pattern of the names of the tables in the folder that HPCTRAIN_DATA names."""
DATA_VARIABLE = "HPCTRAIN_DATA"


def data_files(given: Path | None, environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the paths of the tables of runs: `given`, or if it is a folder, the tables in it; without it the tables in
    the folder that HPCTRAIN_DATA names.

    Raises:
        InputError: no table was given and HPCTRAIN_DATA is not set, or the folder has no table.
    """
    folder = given or (Path(named) if (named := environment.get(DATA_VARIABLE)) else None)
    if folder is None:
        raise InputError(f"no table of measured runs: give one with --data, or set {DATA_VARIABLE} to its folder")
    tables = sorted(folder.glob(FILES)) if folder.is_dir() else [folder]
    if not tables:
        raise InputError(f"{folder}: no table of measured runs: found no {FILES}; give a table with --data")
    return tables


def measure(paths: Sequence[Path], progress: Callable[[str], None]) -> dict[str, Any]:
    """Score the planner's predictions for the runs of all tables. Return the record: errors, rankings, baseline, and
    runs that were left out. Sailor's layer times come from a folder beside the first table, else in the folder that
    HPCTRAIN_DATA names.

    Args:
        paths: the tables of runs, at least one.
        progress: called with a text about each part of the work.

    Raises:
        InputError: a table or the layer times cannot be read.
    """
    scenes, left_out = scenes_of(read_tables(paths), read_figures(_profile_folder(paths[0])))
    if not scenes:
        raise InputError(f"{paths[0]}: no run of it can be described: {next(iter(left_out.values()))}")
    progress(f"{len(scenes)} runs")
    told, usual = held_out(scenes, progress), packaged(scenes)
    kinds, by_step, ratios = kind_errors(scenes, progress)
    errors, orders = time_errors(scenes, told), rankings(scenes, told)
    fitted = [scene for scene in scenes if was_fitted(scene)]
    simple = baseline(scenes)
    simple_orders = rankings(scenes, simple)
    return machine_and_versions("published_runs", {"data": [path.name for path in paths]}) | {
        "error_pct": _by_problem(errors),
        "error_in_sample_pct": _by_problem(time_errors(fitted, usual)),
        "measured_by_predicted": weighted_quantiles(
            [(scene.run.family, scene.run.step_s / told[scene.run.id]) for scene in scenes if scene.run.step_s]
        ),
        "measured_by_predicted_of": _by_card(scenes, ratios),
        "kinds": summary(kinds),
        "problems_of_kinds": by_step,
        "errors": {problem: asdict(each) for problem, each in errors.items()},
        "memory_errors": {problem: asdict(each) for problem, each in _memory_errors(scenes).items()},
        "memory_fits": memory_fits(scenes),
        "regret_pct": _mean([each.regret_pct for each in orders.values()]),
        "rank_correlation": _mean([each.rank_correlation for each in orders.values()]),
        "rankings": {problem: asdict(each) for problem, each in orders.items()},
        "baseline": {
            "error_pct": _by_problem(time_errors(scenes, simple)),
            "rankings": {problem: asdict(each) for problem, each in simple_orders.items()},
        },
        "left_out": left_out,
        "failed_runs": sum(scene.run.step_s is None for scene in scenes),
    }


def _by_card(scenes: Sequence[PublishedScenario], ratios: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
    """Return GPU -> quantiles of the measured step divided by the predicted one over its runs, each publication with
    the same weight.

    Args:
        ratios: run id -> measured step divided by the predicted one.
    """
    cards: dict[str, list[tuple[str, float]]] = {}
    for scene in scenes:
        if scene.run.id in ratios:
            card = scene.run.card if scene.run.mixed else str(gpu_of(scene.run.gpu)).split("-4")[0]
            cards.setdefault(card, []).append((scene.run.publication, ratios[scene.run.id]))
    return {card: weighted_quantiles(values) for card, values in cards.items()}


def _profile_folder(path: Path) -> Path:
    beside = path.parent / FOLDER
    return beside if beside.is_dir() else Path(os.environ.get(DATA_VARIABLE, "")) / FOLDER


def _by_problem(errors: Mapping[str, Errors]) -> dict[str, Any]:
    """Return {"mean": mean of the problems' errors, "by_problem": problem -> mean absolute error}, in percent. Every
    problem has the same weight."""
    return {
        "mean": _mean([each.mean for each in errors.values()]),
        "by_problem": {problem: each.mean for problem, each in errors.items()},
    }


def _memory_errors(scenes: Sequence[PublishedScenario]) -> dict[str, Errors]:
    """Return problem -> errors of the predicted peak memory, for runs whose peak was measured."""
    found = {}
    for problem, same in by_problem(scenes).items():
        pairs = [(scene.memory_bytes(), scene.run.peak_bytes) for scene in same if scene.run.peak_bytes is not None]
        if pairs:
            found[problem] = errors_of([a for a, _ in pairs], [b for _, b in pairs])
    return found


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
