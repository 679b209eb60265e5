"""The key `energy` of run.yaml."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpctrain.records.format.document import Part

HOURS = 24
"""Hours of a day."""
CarbonIntensity = Annotated[float, Field(ge=0, le=5000)]
CarbonByHour = Annotated[list[CarbonIntensity], Field(min_length=HOURS, max_length=HOURS)]


class Energy(Part):
    """How often nodes record their energy and their GPUs' health, and how much carbon dioxide a kilowatt-hour stands
    for."""

    every_s: float = Field(default=10.0, ge=0.2, le=3600)
    """Seconds between two lines of a node in metrics-nodes.jsonl. In long runs and on many nodes, lines are further
    apart, so that the file stays small."""
    carbon_intensity: CarbonIntensity | CarbonByHour | None = None
    """Grams of CO2 equivalent per kilowatt-hour of your grid: a number, or a list of 24 numbers, one for each hour of
    the day in UTC, from 00:00 on. Default: carbon is not estimated."""

    def grams_per_joule(self, time_s: float) -> float | None:
        """Return the grams of CO2 equivalent that a joule stands for.

        Args:
            time_s: when the joule was used, in seconds since 1970.
        """
        intensity = self.carbon_intensity
        if isinstance(intensity, list):
            intensity = intensity[int(time_s // 3600) % HOURS]
        return None if intensity is None else intensity / 3.6e6
