"""Fits the calibration profile of a run to the newest generations in its folder that made enough steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.planner.replan.calibration import WARMUP_STEPS, WINDOW, fit_profile, merge_profiles
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.generation import Generation
from hpctrain.records.history.metric import MetricRow
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology

MIN_GENERATION_STEPS = 50
"""The fewest steps of a generation that the fit uses."""
MAX_GENERATIONS = 3
"""Largest number of generations that the fit uses: the newest, and few of them, because a run waits for its new
plan.
"""


def learned_profile(folder: Path, run: Run, spec: Spec) -> CalibrationProfile:
    """Return the factors on the planner's constants that fit the steps in a run folder.

    Args:
        folder: a run folder.
        run: its run file.
        spec: the run's model.

    Raises:
        InputError: no generation made enough steps with a plan that the cost model can predict, with reasons.
        FileError: a file in the folder is damaged.
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
