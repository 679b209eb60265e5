"""The key `profile` of plan.json: factors on the constants of the cost model, from measured steps of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpctrain.records.format.document import Part

LEAST_FACTOR, LARGEST_FACTOR = 0.2, 5.0
"""Allowed range of every factor. A factor outside this range has another cause than a wrong constant."""


Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CalibrationProfile(Part):
    """A profile: measured steps of a run as factors on the times that the planner predicts, and the memory that a
    worker takes besides its tensors. A factor that the measured steps do not determine is absent and counts as 1;
    `remarks` has the reason."""

    source: str
    """Name of the run folder whose steps were measured."""
    generations: list[int]
    """Numbers of the generations of the run whose steps were used."""
    steps: int = Field(ge=1)
    """Number of steps that were used, over all these generations; factors come from medians over steps."""
    compute: dict[str, Above0] = {}
    """Type of a device, such as a GPU's name -> factor on the time of computation: the median over stages of measured
    time divided by predicted time."""
    tensor_parallel: Above0 | None = None
    """Factor on the time in which torch dispatches operations on DTensors, with tensor parallelism."""
    communication: Above0 | None = None
    """Factor on the time of stage messages and of all-reduces over replicas."""
    update: Above0 | None = None
    """Factor on the time of the gradient norm and the optimizer, which run once a step."""
    process_bytes: dict[str, Above0] = {}
    """Device kind (cpu, cuda) -> bytes that a worker takes besides the tensors that the planner counts: the memory that
    was measured before the worker built the model, and the part of the measured peak that this memory and the tensors
    do not explain."""
    remarks: dict[str, str] = {}
    """Name of a factor -> why it is unknown, or what is wrong with it."""
