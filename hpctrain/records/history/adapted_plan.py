"""The plan that the next generation runs although nothing has failed, as a file between the agent that chooses it and
the agent that makes the next record."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hpctrain.records.format.document import Document
from hpctrain.records.format.file_name import PathBelow


class AdaptedPlan(Document):
    """The plan that replaces that of a generation because of measured times. It counts if all ranks of that generation
    stop after the same step; after a fault, it does not."""

    schema_kind: ClassVar[str] = "adapted_plan"

    generation: int = Field(ge=0)
    """Number of the generation whose plan is replaced."""
    plan: PathBelow
    """File of the new plan, within the run folder."""
    reason: str
    """Why the plan changes, in one sentence."""
    measured_step_time_s: float = Field(gt=0)
    """Seconds that a step of the generation took before the plan was chosen."""
    predicted_step_time_s: float = Field(gt=0)
    """Seconds that a step with the new plan is predicted to take."""
    corrects_probe: bool = False
    """Whether the plan corrects the probe's figures: it comes from the attempt's first comparison of plans, before
    which no speed changed."""
    taken_back: bool = False
    """Whether the new plan is the one before the last change, because the last change made steps longer than
    predicted."""


def adapted_plan_file(generations: Path, number: int) -> Path:
    """Return the path of the new plan's document for generation `number` in the folder `generations`."""
    return generations / f"adapted-{number:06d}.json"
