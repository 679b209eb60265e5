"""Measured times of a model's layers, which stand in for the roofline where somebody has measured them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ForwardBackward = tuple[float, float]


@dataclass(frozen=True)
class LayerTimes:
    """Seconds (forward, backward) of one micro-batch, the tensor-parallel sums within."""

    block: ForwardBackward
    embedding: ForwardBackward
    head: ForwardBackward
    update: float
    """Seconds of the optimizer for one block."""


@dataclass(frozen=True)
class LayerProfile:
    """What was measured of a model on kinds of devices."""

    times: Mapping[tuple[str, int, int], LayerTimes]
    """(device type, tp, micro-batch) -> its times."""

    def at(self, device_type: str, tp: int, micro_batch: int) -> LayerTimes | None:
        """The times of exactly these numbers; None where they were not measured."""
        return self.times.get((device_type, tp, micro_batch))
