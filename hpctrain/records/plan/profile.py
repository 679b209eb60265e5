"""profile of plan.json: what steps that were really made say of the planner's constants on this cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpctrain.records.format.document import Part

LEAST_FACTOR, LARGEST_FACTOR = 0.2, 5.0
"""No factor leaves this range: beyond it something else is wrong than a constant."""


Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CalibrationProfile(Part):
    """Factors on the planner's times and what a worker holds beside its tensors. What the steps do not determine is
    absent, which counts as a factor of 1, and `remarks` says why."""

    source: str
    """Whose steps they are: the run's folder."""
    generations: list[int]
    """Those of its generations that were used."""
    steps: int = Field(ge=1)
    """Steps over which medians were taken, in all of them."""
    compute: dict[str, Above0] = {}
    """By type of device: measured time of a stage, as a part of the predicted one."""
    tensor_parallel: Above0 | None = None
    """Factor on the dispatch of sharded tensors."""
    communication: Above0 | None = None
    """Factor on messages, and on sums over replicas."""
    update: Above0 | None = None
    """Factor on the norm and the optimizer: what a step takes once."""
    process_bytes: dict[str, Above0] = {}
    """By kind of device: what a worker holds beside the tensors that are counted. Of it, the worker's memory before it
    built the model was measured as such; the rest is the measured peak less that and the tensors, not below 0."""
    remarks: dict[str, str] = {}
    """Name of a factor -> why it is unknown, or what was wrong with it."""
