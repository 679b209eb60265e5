"""The key `profile` of plan.json: factors on the planner's constants, from measured steps on this cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpctrain.records.format.document import Part

LEAST_FACTOR, LARGEST_FACTOR = 0.2, 5.0
"""Allowed range of every factor: a factor outside of it has another cause than a wrong constant."""


Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CalibrationProfile(Part):
    """Factors on the planner's times, and the memory that a worker takes besides its tensors. A factor that the
    measured steps do not determine is absent and counts as 1; `remarks` gives the reason."""

    source: str
    """Folder of the run whose steps were measured."""
    generations: list[int]
    """Generations of that run that were used."""
    steps: int = Field(ge=1)
    """Steps in all these generations, over which medians were taken."""
    compute: dict[str, Above0] = {}
    """Device type -> measured time of a stage divided by the predicted time."""
    tensor_parallel: Above0 | None = None
    """Factor on the dispatch of sharded tensors."""
    communication: Above0 | None = None
    """Factor on stage messages and on all-reduces over replicas."""
    update: Above0 | None = None
    """Factor on the norm and the optimizer, which run once a step."""
    process_bytes: dict[str, Above0] = {}
    """Device kind -> bytes that a worker holds besides the counted tensors. Its memory before it built the model was
    measured directly; the rest is the measured peak less that and the tensors, at least 0."""
    remarks: dict[str, str] = {}
    """Name of a factor -> why it is unknown, or what is wrong with it."""
