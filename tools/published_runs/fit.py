"""Fits the cost model's constants to measured runs, and predicts runs with constants that were fitted without them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hpctrain.planner.devices.constants import CUDA_CONSTANTS, CostConstants, UpdateCost
from tools.published_runs.scenario import PublishedScenario

FITTED_FAMILIES = ("vTrain multi-node", "vTrain single node")
"""Families of runs that all constants but `ATTENTION` are fitted on: they have many runs of small and large models on
one kind of GPU."""
ATTENTION = "attention_passes"
"""The constant of fused attention, which vTrain's runs do not have."""
ATTENTION_FAMILY = "llm-foundry"
"""Family of runs that `ATTENTION` is fitted on. Runs of families other than this and `FITTED_FAMILIES` are only
predicted."""
KINDS_WITHOUT_VTRAIN = ("Korthikanti", "BigScience", "llm-foundry", "Sailor")
"""Publications whose runs on GPUs of one kind stand in for vTrain's in a fit that holds vTrain out, without the layer
times that a publication measured."""
HOST_BESIDE = "overlap_power"
"""The constant that says how much of the host's time the device hides. Without vTrain no runs determine it: the device
limits nearly all of them, BigScience's host waited for each kernel, and Sailor's steps are longer than predicted on
the host and on the device. A fit to them lets host and device wait for each other, which CUDA's host does not do. So it
keeps its start value there."""
MOST_OF_A_PROBLEM = 48
"""Most runs of one problem (`MeasuredRun.problem`) in a fit, evenly spaced: more runs of the same kind change little
and take time."""
PACKAGED: Mapping[str, float] = {
    "efficiency": CUDA_CONSTANTS.efficiency,
    "half_width": CUDA_CONSTANTS.half_width,
    "activation_passes": CUDA_CONSTANTS.activation_passes[0],
    "block_ops": CUDA_CONSTANTS.block_ops[0],
    "collective_ops": CUDA_CONSTANTS.collective_ops,
    "optimizer_bytes": 11.8,
    "step_ops": CUDA_CONSTANTS.step_ops,
    "weight_passes": CUDA_CONSTANTS.weight_passes[0],
    "logits_passes": CUDA_CONSTANTS.logits_passes[0],
    "action_ops": CUDA_CONSTANTS.action_ops,
    "overlap_power": CUDA_CONSTANTS.overlap_power,
    "attention_passes": CUDA_CONSTANTS.attention_passes[0],
}
"""The cost model's constants for GPUs, which are the result of `fit` on the runs for which `was_fitted` is true.
`optimizer_bytes` is that of Megatron's fused optimizer."""
LAST_MULTI = 40
"""Number of the last vTrain run on several nodes that `PACKAGED` was fitted on; the first is 0."""
START: Mapping[str, float] = {
    "efficiency": 0.85,
    "half_width": 30.0,
    "activation_passes": 3.0,
    "block_ops": 64.0,
    "collective_ops": 1.0,
    "optimizer_bytes": 16.0,
    "step_ops": 64.0,
    "weight_passes": 1.5,
    "logits_passes": 1.5,
    "action_ops": 38.0,
    "overlap_power": 4.0,
    "attention_passes": 0.02,
}
"""Start values of a fit, kept where the runs do not decide: the counts of the constants for CPUs (calls times 0.15,
activations halved, because kernels are fused) and a typical efficiency. None comes from the runs, so held-out runs
stay unseen."""
LARGEST_EFFICIENCY = 0.95
"""Upper limit of the constant `efficiency`."""
PULL = 0.02
"""Weight of the regularisation that pulls each constant to its start value."""
NOISE = 0.02
"""Relative errors above this count linearly instead of squared, so that single disturbed runs do not dominate a fit."""
LEVEL = 0.3
"""Weight of the mean error of a kind of runs in a fit of several kinds. Such means are differences between machines and
between publications, which one measured step shows; constants shall say how times change with the plan."""
BACKWARD_OPS = 1.6
"""Calls in a block's backward pass divided by those in its forward pass, as in the constants for CPUs."""


def constants_by(values: Mapping[str, float]) -> CostConstants:
    """Return the cost model's constants for Megatron's blocks.

    Args:
        values: name of a constant -> its fitted value, with the names of `PACKAGED`.
    """
    values = {**START, **values}
    forward, logits, weights = values["activation_passes"], values["logits_passes"], values["weight_passes"]
    attention = values["attention_passes"]
    update = UpdateCost(values["optimizer_bytes"], CUDA_CONSTANTS.optimizer.ops)
    return replace(
        CUDA_CONSTANTS,
        efficiency=min(values["efficiency"], LARGEST_EFFICIENCY),
        half_width=values["half_width"],
        activation_passes=(forward, 2 * forward),
        block_ops=(values["block_ops"], BACKWARD_OPS * values["block_ops"]),
        collective_ops=values["collective_ops"],
        optimizer=update,
        split_optimizer=update,
        step_ops=values["step_ops"],
        weight_passes=(weights, 2 * weights),
        logits_passes=(logits, 2 * logits),
        action_ops=values["action_ops"],
        overlap_power=max(1.0, values["overlap_power"]),
        attention_passes=(attention, 2 * attention),
        sharded_optimizer=update,
        tensor_parallel_ops=(0.0, 0.0),  # hand-written in Megatron, DTensor in hpctrain
        recompute_ops=(0.0, 0.0),
    )


def fit(scenes: Sequence[PublishedScenario], start: Mapping[str, float] = START, steps: int = 14) -> dict[str, float]:
    """Return name of a constant -> the value with the least relative error of step times. Each problem
    (`MeasuredRun.problem`) has the same weight, however many runs it has. With several kinds of runs
    (`MeasuredRun.kind`), what all runs of a kind have in common counts only by the share `LEVEL`.

    Args:
        start: the constants to fit, with their start values.
        steps: most iterations of the solver.

    Raises:
        ValueError: there is no run to fit to.
    """
    chosen = _thinned(scenes)
    if not chosen:
        raise ValueError("no runs to fit constants to")
    counts = Counter(scene.run.problem for scene in chosen)
    weight = np.array([1 / math.sqrt(counts[scene.run.problem]) for scene in chosen])
    measured = np.log([scene.run.step_s or math.nan for scene in chosen])
    kinds = list(dict.fromkeys(scene.run.kind for scene in chosen))
    kind = np.array([kinds.index(scene.run.kind) for scene in chosen])
    share = weight**2 / np.bincount(kind, weight**2)[kind]
    names, first = list(start), np.log(list(start.values()))
    fixed = PACKAGED if names == [ATTENTION] else START

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        constants = constants_by({**fixed, **dict(zip(names, np.exp(logs), strict=True))})
        error = np.log([scene.step_s(constants) for scene in chosen]) - measured
        if len(kinds) > 1:
            error -= (1 - LEVEL) * np.bincount(kind, share * error)[kind]
        return np.concatenate([weight * error, PULL * (logs - first)])

    found = least_squares(errors, first, loss="soft_l1", f_scale=NOISE, diff_step=1e-3, max_nfev=steps)
    return {name: float(value) for name, value in zip(names, np.exp(found.x), strict=True)}


def was_fitted(scene: PublishedScenario) -> bool:
    """Return whether `PACKAGED` was fitted on the scenario's run: those are vTrain's first 41 runs on several nodes,
    and its runs with odd numbers on one node."""
    run = scene.run
    if run.family not in FITTED_FAMILIES or run.step_s is None:
        return False
    number = int(run.id[-4:]) if run.id[-4:].isdigit() else -1
    return 0 <= number <= LAST_MULTI if run.family == "vTrain multi-node" else number % 2 == 1


def held_out(scenes: Sequence[PublishedScenario], progress: Callable[[str], None]) -> dict[str, float]:
    """Return run id -> predicted seconds of a step. A run that `PACKAGED` was fitted on is predicted with constants
    that were fitted without its whole problem (`MeasuredRun.problem`), a run of `ATTENTION_FAMILY` with a value of
    `ATTENTION` that was fitted without its kind (`MeasuredRun.kind`); other runs are predicted with `PACKAGED`.

    Args:
        progress: called with a text about each fit.
    """
    seen = [scene for scene in scenes if was_fitted(scene)]
    constants: dict[str, CostConstants] = {}
    for problem in dict.fromkeys(scene.run.problem for scene in seen):
        others = [scene for scene in seen if scene.run.problem != problem]
        if others:
            progress(f"constants without {problem}")
            constants[problem] = constants_by(fit(others, _start_without(ATTENTION)))
    for kind in dict.fromkeys(scene.run.kind for scene in scenes if scene.run.family == ATTENTION_FAMILY):
        constants |= dict.fromkeys(
            (scene.run.problem for scene in scenes if scene.run.kind == kind), without_kind(scenes, kind, progress)
        )
    usual = constants_by(PACKAGED)
    fitted = {scene.run.id for scene in seen} | {s.run.id for s in scenes if s.run.family == ATTENTION_FAMILY}
    return {
        scene.run.id: scene.step_s(constants.get(scene.run.problem, usual) if scene.run.id in fitted else usual)
        for scene in scenes
    }


def without_kind(scenes: Sequence[PublishedScenario], kind: str, progress: Callable[[str], None]) -> CostConstants:
    """Return the constants that are fitted without a kind of runs (`MeasuredRun.kind`). If vTrain is held out, the runs
    of `KINDS_WITHOUT_VTRAIN` determine all constants but `HOST_BESIDE`. If a kind of
    `ATTENTION_FAMILY` is held out, the other kinds of this family determine `ATTENTION`. Other kinds determine no
    constant, so the result is `PACKAGED`.

    Args:
        progress: called with a text about a fit.
    """
    held = next((scene.run for scene in scenes if scene.run.kind == kind), None)
    others = [scene for scene in scenes if scene.run.kind != kind and scene.run.step_s is not None]
    if held is None:
        return constants_by(PACKAGED)
    if held.family in FITTED_FAMILIES:
        pool = [
            replace(scene, profile=None)
            for scene in others
            if scene.run.publication in KINDS_WITHOUT_VTRAIN and not scene.run.mixed
        ]
        values = _start_without(HOST_BESIDE)
    elif held.family == ATTENTION_FAMILY:
        pool = [scene for scene in others if scene.run.family == ATTENTION_FAMILY]
        values = {ATTENTION: START[ATTENTION]}
    else:
        return constants_by(PACKAGED)
    if pool:
        progress(f"constants without {kind}")
        values = fit(pool, values)
    return constants_by({**(values if held.family in FITTED_FAMILIES else PACKAGED), **values})


def _start_without(constant: str) -> dict[str, float]:
    return {name: value for name, value in START.items() if name != constant}


def packaged(scenes: Sequence[PublishedScenario]) -> dict[str, float]:
    """Return run id -> seconds of a step, predicted with `PACKAGED`."""
    constants = constants_by(PACKAGED)
    return {scene.run.id: scene.step_s(constants) for scene in scenes}


def _thinned(scenes: Sequence[PublishedScenario]) -> list[PublishedScenario]:
    by_problem: dict[str, list[PublishedScenario]] = {}
    for scene in scenes:
        by_problem.setdefault(scene.run.problem, []).append(scene)
    return [scene for same in by_problem.values() for scene in same[:: -(-len(same) // MOST_OF_A_PROBLEM)]]
