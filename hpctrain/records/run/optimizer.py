"""The `optimizer` section of run.yaml, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from hpctrain.records.format.document import STEPS_MAX, Part

FINAL_RATE = 0.1
"""Learning rate at the end of a run with decay, as a fraction of the peak."""


class StepsChange(Part):
    """A change of the run's number of steps."""

    at: int = Field(ge=1)
    """Steps that were done at the change."""
    before: int = Field(ge=1)
    """Total steps of the run before the change."""


class Optimizer(Part):
    """AdamW, whose learning rate has a linear warm-up and then may decay."""

    name: Literal["adamw"] = "adamw"
    """AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's beta1 and beta2: decay rates of the running mean and of the running mean square of gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, added to the root of the running mean square."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Factor of the decoupled weight decay, which applies to matrices only."""
    warmup_steps: int = Field(default=1000, ge=0, le=STEPS_MAX)
    """Steps in which the learning rate rises linearly to its peak, but at most a tenth of the run's steps."""
    decay: Literal["constant", "cosine", "linear"] = "constant"
    """Decay of the learning rate after the warm-up. constant: none. cosine, linear: down to a tenth of the peak at the
    end of the run."""
    steps_changed: list[StepsChange] = []
    """Written by hpctrain: the changes of the run's number of steps, in order. After a change, the learning rate decays
    from the value that it had reached, and the length of the warm-up stays."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of the gradient of all parameters; a larger gradient is scaled down to it. null: no clipping."""

    def warmup(self, steps: int) -> int:
        """Return the number of steps in which the learning rate warms up: at most a tenth of the steps with which the
        run began, but at least 1 if `warmup_steps` is not 0.

        Args:
            steps: present number of steps of the run.
        """
        return min(self.warmup_steps, max(1, self.first_steps(steps) // 10)) if self.warmup_steps else 0

    def first_steps(self, steps: int) -> int:
        """Return the number of steps with which the run began.

        Args:
            steps: present number of steps of the run.
        """
        return self.steps_changed[0].before if self.steps_changed else steps

    def with_steps_changed(self, at: int, before: int) -> Optimizer:
        """Return the settings with a change of the run's number of steps added to `steps_changed`.

        Args:
            at: number of steps done; at 0 no change is recorded. Recorded changes at this or a later step are dropped,
                because the run went back to a checkpoint from before them.
            before: total steps of the run before the change.
        """
        undone = [change.before for change in self.steps_changed if change.at >= at]
        earlier = [change for change in self.steps_changed if change.at < at]
        changes = [*earlier, StepsChange(at=at, before=(undone or [before])[0])] if at else []
        return self.model_copy(update={"steps_changed": changes})


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of the step that follows `step` completed steps, in a run of `steps` steps.

    A linear warm-up is followed by the peak (decay constant), or by a decay to a tenth of the peak. If the number of
    steps was changed during the run, the decay continues from the learning rate that was reached.
    """
    warmup = settings.warmup(steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    lengths = [(change.at, change.before) for change in settings.steps_changed if change.at <= step]
    now = next((change.before for change in settings.steps_changed if change.at > step), steps)
    return settings.lr * _decayed(settings.decay, step, warmup, [*lengths, (step, now)])


def _decayed(
    decay: Literal["constant", "cosine", "linear"], step: int, warmup: int, lengths: Sequence[tuple[int, int]]
) -> float:
    """Return the learning rate after the warm-up, as a fraction of the peak.

    Args:
        step: number of completed steps.
        warmup: number of warm-up steps.
        lengths: the parts of the run between changes of its total number of steps, in order. For each part: (completed
            steps when the part ended, total number of steps during the part). The last part ends at `step`.
    """
    rate, begin = 1.0, warmup
    if decay == "constant":
        return rate
    for until, steps in lengths:
        end = min(until, step)
        if end <= begin:
            continue
        progress = min(1.0, (end - begin) / max(1, steps - begin))
        remaining = 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        rate, begin = FINAL_RATE + (rate - FINAL_RATE) * remaining, end
    return rate
