"""Measured times of a model's layers; where they exist they replace the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ForwardBackward = tuple[float, float]


@dataclass(frozen=True)
class LayerTimes:
    """Seconds (forward, backward) of one micro-batch, including tensor-parallel all-reduces."""

    block: ForwardBackward
    embedding: ForwardBackward
    head: ForwardBackward
    update: float
    """Seconds of the optimizer for one block."""


@dataclass(frozen=True)
class LayerProfile:
    """Measured layer times of one model."""

    times: Mapping[tuple[str, int, int], LayerTimes]
    """(device type, tp, micro-batch) -> its times."""

    def at(self, device_type: str, tp: int, micro_batch: int) -> LayerTimes | None:
        """The times for exactly this device type, tp and micro-batch size; None if they were not measured."""
        return self.times.get((device_type, tp, micro_batch))
