"""Section `adapt` of run.yaml: when the plan of a running job changes because of what was measured."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.records.format.document import STEPS_MAX, Part

AdaptMode = Literal["off", "once", "online"]
"""When a run may take another plan: never, once after its first steps, or then and after each lasting change."""


class Adapt(Part):
    """When the plan of a running job is replaced by one that its measured times suggest, without a fault."""

    mode: AdaptMode | None = None
    """off: only the loss of a node changes the plan. once: plans are compared once in an attempt, after `after` steps.
    online: also after each lasting change of a device's speed. Each change of the plan starts a generation from the
    state in memory; a plan that makes steps longer is taken back. Default: online, and off with `deterministic`."""
    after: int = Field(default=64, ge=20, le=STEPS_MAX)
    """Steps of an attempt after which plans are compared for the first time."""
