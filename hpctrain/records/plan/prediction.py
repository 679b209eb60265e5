"""What the planner writes into plan.json beside the plan itself: predicted time and memory, rejected neighbours, and
the state that has to move."""

from __future__ import annotations

from hpctrain.records.format.document import Part
from hpctrain.records.format.node_name import DeviceId

LEAST_USEFUL_BOUND = 0.85
"""Smallest share of the predicted step at which a lower bound of it is shown."""


class Predicted(Part):
    """The planner's prediction for a plan."""

    step_time_s: dict[str, float]
    """Term of the step time -> its seconds. The terms are compute, pipeline_bubble, pipeline_send, tensor_parallel,
    data_parallel and optimizer; 'total' is their sum."""
    memory_bytes: dict[DeviceId, float]
    """Device id -> peak memory in bytes."""
    bound_s: float | None = None
    """Lower bound in seconds: by the same cost model, no plan on these devices has a shorter step."""

    @property
    def useful_bound_s(self) -> float | None:
        """Return `bound_s` if it is at least the share `LEAST_USEFUL_BOUND` of the predicted step time, else None: a
        smaller bound does not say whether another plan is faster."""
        least_s = LEAST_USEFUL_BOUND * self.step_time_s["total"]
        return None if self.bound_s is None or self.bound_s < least_s else self.bound_s


class Rejected(Part):
    """A rejected neighbour: a plan that differs little from the chosen one, and why it was not chosen."""

    change: str
    """How the neighbour differs from the chosen plan."""
    delta_s: float | None = None
    """Seconds by which a step of the neighbour is longer; absent if its step was not predicted, for example because
    the neighbour cannot run at all."""
    reason: str
    """Why the neighbour was rejected, in one sentence."""


class Move(Part):
    """Blocks whose state a new plan assigns to another device than the old plan."""

    layers: tuple[int, int]
    """Blocks [from, to)."""
    source: DeviceId
    """Device id ('node:device') of the device that holds the state under the old plan."""
    target: DeviceId
    """Device id of the device that holds the state under the new plan."""
