"""Fits factors on the planner's constants to measured steps of a run.

A step gives one equation for each separate measurement: the passes of every stage, the whole step, the peak memory.
Terms that no measurement separates share a factor or stay unknown. The profile says which terms these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.planner.cost.memory import PROCESS_BYTES
from hpctrain.planner.layout.plan_conversion import CostedLayout, layout_of_plan
from hpctrain.planner.replan.factor import compute_factor, solve_factor
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.generation import Generation
from hpctrain.records.history.run_log import MetricRow
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import LARGEST_FACTOR, LEAST_FACTOR, CalibrationProfile
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES

MIN_GENERATION_STEPS = 50
"""The fewest steps that a generation must have made for the fit to use it."""
MAX_GENERATIONS = 3
"""Largest number of generations that the fit uses, the newest ones. More would take longer, and a run waits for its new
plan.
"""


def learned_profile(folder: Path, run: Run, spec: Spec) -> CalibrationProfile:
    """Return the factors on the planner's constants that fit the measured steps in a run folder.

    Args:
        folder: a run folder.
        run: the run file of the folder.
        spec: the run's model.

    Raises:
        InputError: no generation made enough steps with a plan that the cost model can predict; the message has the
            reasons.
        FileError: a file in the folder is missing, damaged or too large.
        UntrustedError: a file belongs to somebody else, or others can write to it.
    """
    topology = Topology.read(folder / "topology.json", owned=True)
    by_generation: dict[int, list[Any]] = {}
    for line in read_jsonl(folder / "metrics.jsonl"):
        if isinstance(line, dict) and isinstance(number := line.get("generation"), int):
            by_generation.setdefault(number, []).append(line)
    profiles: list[CalibrationProfile] = []
    reasons: list[str] = []
    for file in sorted((folder / "generations").glob("gen-*.json"), reverse=True):
        record = Generation.read(file, owned=True)
        lines = by_generation.get(record.number, [])
        if len(lines) < MIN_GENERATION_STEPS:
            reasons.append(
                f"generation {record.number} made {len(lines)} steps, at least {MIN_GENERATION_STEPS} are needed"
            )
        elif len(profiles) < MAX_GENERATIONS:
            try:
                profiles.append(_profile_of_generation(folder, record, run, spec, topology, lines))
            except HpctrainError as error:
                reasons.append(f"generation {record.number}: {error}")
    if not profiles:
        raise InputError(f"{folder}: no profile can be made of it: {'; '.join(reasons[:3]) or 'it never trained'}")
    return merge_profiles(profiles[::-1])


def _profile_of_generation(
    folder: Path, record: Generation, run: Run, spec: Spec, topology: Topology, lines: Sequence[Any]
) -> CalibrationProfile:
    plan = Plan.read(folder / record.plan, owned=True)
    members = topology.only([member.node for member in record.members])
    if plan.topology_sha256 not in (None, topology.sha256(), members.sha256()):
        raise InputError("its plan was made for another topology than the one in the folder")
    # The first rows say what each rank runs. Of a long run only the last rows are needed in addition.
    wanted = [*lines[:WARMUP_STEPS], *lines[WARMUP_STEPS:][-WINDOW:]]
    rows = [MetricRow.from_json(line, str(folder / "metrics.jsonl")) for line in wanted]
    return fit_profile(plan, run, spec, topology, rows, folder.name)


WARMUP_STEPS = 5
"""Number of first steps of a generation that are ignored, because memory is touched for the first time and
caches fill.
"""
MIN_STEPS = 10
"""The fewest steps after the first `WARMUP_STEPS` from which a median is taken."""
WINDOW = 100
"""Largest number of steps that the fit uses. They are the last ones, because these show the cluster's present state."""
MIN_TERM_SHARE = 0.05
"""Least share that a term must have in the sum of communication and update to get a factor; else the term stays
unknown.
"""


def fit_profile(
    plan: Plan, run: Run, spec: Spec, topology: Topology, rows: Sequence[MetricRow], source: str = ""
) -> CalibrationProfile:
    """Return the factors on the planner's constants that fit the measured steps of one generation.

    Args:
        plan: the plan that the generation ran.
        topology: the topology that the plan was made for.
        rows: the generation's rows of metrics.jsonl in order of steps, beginning with the generation's first step.
        source: name of the run, for messages.

    Raises:
        InputError: there are too few steps, they are not of this plan, the topology lacks a figure, or the cost model
            cannot predict the plan.
    """
    timed = [row for row in rows[WARMUP_STEPS:] if not row.skipped][-WINDOW:]
    if len(timed) < MIN_STEPS:
        count = f"found {len(rows)} steps of generation {rows[0].generation}" if rows else "found no step"
        raise InputError(f"{source}: metrics.jsonl: {count}; a profile needs at least {WARMUP_STEPS + MIN_STEPS}")
    _check(plan, run, timed, source)
    fit = _Fit(plan, run, spec, topology, timed)
    profile = CalibrationProfile(source=source, generations=[timed[0].generation], steps=len(timed))
    profile = _with_memory(profile, fit.scene(None), rows)
    if _needs_whole_step(fit):
        return _with_whole_step(profile, fit)
    for with_factors in (_with_compute, _with_tensor_parallel, _with_communication_and_update):
        profile = with_factors(profile, fit)
    return profile


@dataclass(frozen=True)
class _Fit:
    """The measured steps (`timed`) that factors are fitted to, and the plan, the run with its model (`spec`) and the
    topology that produced them."""

    plan: Plan
    run: Run
    spec: Spec
    topology: Topology
    timed: Sequence[MetricRow]

    def scene(self, profile: CalibrationProfile | None, **factors: float) -> CostedLayout:
        """Return the plan's layout with a cost model by `profile`.

        Args:
            profile: factors on the constants; None: the constants themselves.
            factors: factors that replace some of the profile's; unused if `profile` is None.
        """
        if profile is not None:
            profile = profile.model_copy(update=factors)
        return layout_of_plan(self.run, self.spec, self.plan.model_copy(update={"profile": profile}), self.topology)

    def measured_s(self) -> list[float]:
        """Return [stage] -> seconds of its forward and backward passes in a step, median over the measured steps."""
        return [median(times) for times in zip(*(row.stage_time_s for row in self.timed), strict=True)]


def merge_profiles(profiles: Sequence[CalibrationProfile]) -> CalibrationProfile:
    """Return one profile made of several profiles of one cluster: for each factor the median of the known values, for
    the bytes of a worker process the largest value.

    A remark on a factor that some profiles know stays if its profile knows the factor, such as "limited to 5: measured
    7.1". A remark on a factor that no profile knows is that of the last profile.

    Args:
        profiles: at least one.
    """
    if len(profiles) == 1:
        return profiles[0]
    alone: dict[str, float | None] = {}
    for name in ("tensor_parallel", "communication", "update"):
        values = [value for profile in profiles if (value := getattr(profile, name)) is not None]
        alone[name] = median(values) if values else None
    types = dict.fromkeys(name for profile in profiles for name in profile.compute)
    kinds = dict.fromkeys(name for profile in profiles for name in profile.process_bytes)
    compute = {name: median(p.compute[name] for p in profiles if name in p.compute) for name in types}
    memory = {name: max(p.process_bytes[name] for p in profiles if name in p.process_bytes) for name in kinds}
    known: dict[str, object] = alone | {"compute": compute or None, "process_bytes": memory or None}
    return CalibrationProfile(
        source=", ".join(dict.fromkeys(profile.source for profile in profiles)),
        generations=[number for profile in profiles for number in profile.generations],
        steps=sum(profile.steps for profile in profiles),
        compute=compute,
        process_bytes=memory,
        tensor_parallel=alone["tensor_parallel"],
        communication=alone["communication"],
        update=alone["update"],
        remarks=_merged_remarks(profiles, unknown=[name for name, value in known.items() if value is None]),
    )


def _merged_remarks(profiles: Sequence[CalibrationProfile], unknown: Sequence[str]) -> dict[str, str]:
    """Return name of a factor -> the remarks of several profiles on it, as one text. A remark that does not hold for
    all profiles begins with the generations for which it holds.

    Args:
        unknown: names of the factors that no profile knows.
    """
    generations: dict[str, dict[str, list[int]]] = {}
    for profile in profiles:
        for name, text in profile.remarks.items():
            if name not in unknown and getattr(profile, name):
                generations.setdefault(name, {}).setdefault(text, []).extend(profile.generations)
    every = [number for profile in profiles for number in profile.generations]
    remarks = {name: profile.remarks[name] for profile in profiles for name in unknown if name in profile.remarks}
    for name, by_text in generations.items():
        remarks[name] = "; ".join(
            text if numbers == every else f"generation {', '.join(map(str, numbers))}: {text}"
            for text, numbers in by_text.items()
        )
    return remarks


def _check(plan: Plan, run: Run, timed: Sequence[MetricRow], source: str) -> None:
    counts = [replica.micro_batches for replica in plan.replicas]
    tokens = plan.sequences * run.data.seq_len
    for row in timed:
        where = f"{source}: metrics.jsonl: step {row.step} has"
        if len(row.stage_time_s) != len(plan.stages):
            stages = f"{len(row.stage_time_s)} stages, its plan {len(plan.stages)}"
            raise InputError(f"{where} {stages}; they are not of one plan")
        if row.tokens != tokens or row.micro_batches != counts:
            raise InputError(
                f"{where} {row.tokens} tokens in {row.micro_batches} micro-batches, its plan {tokens} in {counts}; "
                "they are not of one run file and plan"
            )


def _needs_whole_step(fit: _Fit) -> bool:
    """Return whether only the whole step says how fast the devices compute: on CUDA devices of one type, whose stages'
    times hold tensor-parallel or ZeRO messages too."""
    devices = [device for row in fit.scene(None).layout.placement for unit in row for device in unit.devices]
    alike = len({device.type for device in devices}) == 1 and devices[0].kind == "cuda"
    return alike and (fit.plan.tp > 1 or fit.plan.zero >= 2)


def _with_whole_step(profile: CalibrationProfile, fit: _Fit) -> CalibrationProfile:
    """Return the profile with the factor on the time of computation that `compute_factor` takes from the whole measured
    step. All other factors stay unknown."""
    device_type = fit.scene(None).layout.placement[0][0].devices[0].type

    def step_s(factor: float) -> float:
        scene = fit.scene(profile.model_copy(update={"compute": {device_type: factor}}))
        return predict(scene.cost, scene.layout, whole=True).total

    factor, limit = compute_factor(step_s, median(row.step_time_s for row in fit.timed))
    if factor is None:
        return _remarked(profile, **dict.fromkeys(("compute", "tensor_parallel", "communication", "update"), limit))
    why = "the whole step gave the factor of computation"
    profile = profile.model_copy(update={"compute": {device_type: factor}})
    compute = "; ".join(filter(None, ["from the whole step, because a stage's time holds messages too", limit]))
    return _remarked(profile, compute=compute, tensor_parallel=why, communication=why, update=why)


def _with_compute(profile: CalibrationProfile, fit: _Fit) -> CalibrationProfile:
    """Return the profile with a factor on the time of computation for each device type: the median ratio of measured
    to predicted time over the stages on devices of this type.

    A stage counts only if all its devices have one type. If the times of stages hold tensor-parallel or ZeRO messages
    too, or no stage counts, the profile gets a remark instead.
    """
    if fit.plan.tp > 1 or fit.plan.zero >= 2:
        what = "sharded tensors" if fit.plan.tp > 1 else "ZeRO's messages"
        return _remarked(profile, compute=f"a stage's time holds {what} too")
    scene = fit.scene(None)
    ratios: dict[str, list[float]] = {}
    for stage, (took, expected) in enumerate(zip(fit.measured_s(), _predicted(scene), strict=True)):
        kinds = {scene.layout.unit(replica, stage).devices[0].type for replica in range(scene.layout.dp)}
        if len(kinds) == 1 and took > 0:
            ratios.setdefault(kinds.pop(), []).append(took / expected)
    if not ratios:
        return _remarked(profile, compute="replicas of unlike devices share every stage, and only the slowest is timed")
    limited = {kind: _limited(median(values)) for kind, values in ratios.items()}
    profile = profile.model_copy(update={"compute": {kind: factor for kind, (factor, _) in limited.items()}})
    remark = "; ".join(f"{kind}: {text}" for kind, (_, text) in limited.items() if text)
    return _remarked(profile, compute=remark) if remark else profile


def _with_tensor_parallel(profile: CalibrationProfile, fit: _Fit) -> CalibrationProfile:
    """Return the profile with its factor `tensor_parallel`: the factor on the time in which torch dispatches operations
    on DTensors.

    With this factor, the predicted seconds of the forward and backward passes of a step, summed over the stages, equal
    the measured seconds. If the factor cannot be determined, the profile gets a remark with the reason instead.
    """
    if fit.plan.tp == 1:
        return _remarked(profile, tensor_parallel="no matrix was shared by several devices")
    if fit.plan.zero >= 2:
        return _remarked(profile, tensor_parallel="a stage's time holds ZeRO's messages too")

    # If the host runs ahead, the time is not linear in the factor, but it never falls as the factor grows.
    factor, remark = solve_factor(
        lambda factor: sum(_predicted(fit.scene(profile, tensor_parallel=factor))), sum(fit.measured_s())
    )
    profile = profile.model_copy(update={"tensor_parallel": factor})
    return _remarked(profile, tensor_parallel=remark) if remark else profile


def _with_communication_and_update(profile: CalibrationProfile, fit: _Fit) -> CalibrationProfile:
    """Return the profile with one value as the factor of both communication and update, fitted to the whole step,
    because neither is timed separately.

    If communication or update takes too small a share of their sum, its factor stays unknown. Both factors stay unknown
    if the sum takes too small a share of the step, or if replicas sum compressed gradients.
    """

    def prediction(**factors: float) -> Prediction:
        scene = fit.scene(profile, **factors)
        return predict(scene.cost, scene.layout, whole=True)

    terms = prediction().terms
    parts = {"communication": terms["pipeline_send"] + terms["data_parallel"], "update": terms["optimizer"]}
    if fit.plan.dp > 1 and not fit.plan.codec.exact:
        return _remarked(profile, communication="sums were compressed", update="sums were compressed")
    names = [name for name, seconds in parts.items() if seconds > MIN_TERM_SHARE * sum(parts.values())]
    for name in parts.keys() - set(names):
        profile = _remarked(profile, **{name: "it took too little of these steps"})
    if sum(parts.values()) < MIN_TERM_SHARE / 2 * terms["total"]:
        return _remarked(profile, **dict.fromkeys(names, "it took too little of these steps"))
    measured_s = median(row.step_time_s for row in fit.timed)
    factor, remark = solve_factor(lambda factor: prediction(**dict.fromkeys(names, factor)).total, measured_s)
    profile = profile.model_copy(update=dict.fromkeys(names, factor))
    if len(names) > 1:
        remark = "; ".join(filter(None, ["one factor for communication and update", remark]))
    return _remarked(profile, **dict.fromkeys(names, remark)) if remark else profile


def _with_memory(profile: CalibrationProfile, scene: CostedLayout, rows: Sequence[MetricRow]) -> CalibrationProfile:
    """Return the profile with the bytes that a worker process holds beyond its tensors.

    They are the larger of two figures: the measured memory before the model is built, and the measured peak less the
    predicted tensors. On CUDA, or if a figure was not measured, the profile gets a remark instead.
    """
    kind = scene.layout.placement[0][0].kind
    if kind != "cpu":
        return _remarked(profile, process_bytes="a CUDA device's allocations are counted, not what the process takes")
    bases = [placed.base_bytes for row in rows for placed in row.placement or [] if placed.base_bytes is not None]
    peaks = [row.memory_bytes_max for row in rows if row.memory_bytes_max is not None]
    if not bases or not peaks:
        return _remarked(profile, process_bytes="the memory of workers before they built the model is not in the rows")
    base, tensors = max(bases), max(scene.layout.memory(scene.cost.memory).values()) - PROCESS_BYTES[kind]
    return profile.model_copy(update={"process_bytes": {kind: max(base, max(peaks) - tensors)}})


def _predicted(scene: CostedLayout) -> list[float]:
    """Return [stage] -> predicted seconds of its forward and backward passes in a step, each stage in its slowest
    replica."""
    layout = scene.layout
    return [max(passes_s(scene, replica, stage) for replica in range(layout.dp)) for stage in range(len(layout.blocks))]


def passes_s(scene: CostedLayout, replica: int, stage: int) -> float:
    """Return the predicted seconds of all forward and backward passes of a stage of a replica in a step."""
    layout = scene.layout
    times = scene.cost.stage(layout.unit(replica, stage), layout.micro_batch, layout.model_parts[stage])
    split = layout.schedule in SPLIT_BACKWARD_SCHEDULES
    return layout.micro_batches[replica] * (times.forward + (times.inputs + times.weights if split else times.backward))


def _limited(factor: float) -> tuple[float, str]:
    limited = min(max(factor, LEAST_FACTOR), LARGEST_FACTOR)
    return limited, "" if limited == factor else f"limited to {limited:g}: measured {factor:.3g}"


def _remarked(profile: CalibrationProfile, **remarks: str) -> CalibrationProfile:
    return profile.model_copy(update={"remarks": profile.remarks | remarks})
