"""Begins the sums of gradients while the pipeline goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Literal

from torch.distributed.tensor import DTensor

from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.parallel.gradients import local_gradients, local_part
from hpctrain.parallel.mesh import reducer_sums_copies
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.records.plan.plan import Plan

Early = Literal["always", "never", "faster"]
"""When sums begin before the end of the pipeline: in every step, in none, or if steps are then shorter."""
WARM_STEPS = 4
"""First steps of a worker, which take longer than others."""
BLOCK_STEPS = 5
"""Consecutive steps with the sums begun in the same way; the first of them does not count."""
TRIAL_BLOCKS = 6
"""Blocks of steps that are compared, half of them with early sums and half with late ones."""
TRIED_STEPS = WARM_STEPS + TRIAL_BLOCKS * BLOCK_STEPS
"""Number of first steps of a worker, after which it begins all sums in one way, early or late."""


def when_sums_begin(plan: Plan, device_type: str) -> Early:
    """Return when the workers of a plan begin the sums of gradients whose reducer is not torch's `fully_shard`."""
    if plan.dp == 1 or (plan.shards > 1 and not reducer_sums_copies(plan, device_type)):
        return "never"
    # On CUDA, the stream of a rank that encodes would wait for other replicas while stages of its own replica wait for
    # the rank.
    if device_type != "cpu" and not plan.codec.exact and len(plan.stages) > plan.pp:
        return "never"
    return "faster" if plan.pp > 1 else "always"


class EarlyOrLate:
    """Decides whether a rank's sums begin early. Early sums share the links with the messages between stages; on slow
    links they may delay these messages by more than they gain.

    After the first steps of a worker, blocks of steps with early and with late sums take turns. The way with the
    shorter median step is then kept. All ranks change the way in the same steps, and steps take equally long on all of
    them. Should ranks decide differently, sums are still right, because they begin in the same order.
    """

    def __init__(self) -> None:
        self.early = True
        """Whether sums begin early in the present step."""
        self._ended_s: float | None = None
        self._steps = 0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def step_ended(self, now_s: float) -> None:
        """Count a step, whose last backward of this rank has just ended.

        Args:
            now_s: seconds on any clock that is never set back.
        """
        block, place = divmod(self._steps - WARM_STEPS, BLOCK_STEPS)
        if block >= TRIAL_BLOCKS:
            return
        if block >= 0 and place > 0 and self._ended_s is not None:
            self._seconds[self.early].append(now_s - self._ended_s)
        self._ended_s, self._steps = now_s, self._steps + 1
        block = (self._steps - WARM_STEPS) // BLOCK_STEPS
        self.early = block % 2 == 0 or block < 0
        if block >= TRIAL_BLOCKS:
            self.early = median(self._seconds[True]) <= median(self._seconds[False])


class EarlySums:
    """Begins the sum of a stage's gradients when the stage's last backward of a step is done, as the observer of the
    stages of this rank. If gradients are plain tensors, buckets of them are sent even within the last backward. If the
    state is sharded, the sum of a `fully_shard` module over the replicate axis begins when the one within the shard
    group has ended."""

    def __init__(
        self, reducer: Reducer, pipeline: Pipeline, order: Sequence[int], choice: EarlyOrLate | None = None
    ) -> None:
        """Become the observer of the pipeline's stages.

        Args:
            order: this rank's stages in the order in which all replicas sum their gradients.
            choice: decides whether sums begin early; None: they always do.
        """
        self._reducer = reducer
        self._choice = choice
        members = pipeline.gradients_of_units()
        units = [(stage, unit) for stage in order for unit in range(len(members[stage]))]
        groups = [members[stage][unit] for stage, unit in units]
        parameters = [parameter for _, parameter in pipeline.parameters()]
        self._groups = {key: number for number, key in enumerate(units)}
        self._parameters = [[parameters[index] for index in group] for group in groups]
        self._stages = frozenset(order)
        self._incomplete = set(order)
        """Stages whose last backward of the present step is still to come."""
        # With tensor parallelism, gradients may still have to be summed over tp; shards are no leaves of autograd.
        hooks = not any(isinstance(parameter, DTensor) for parameter in parameters)
        reducer.overlap([local_part(parameter) for parameter in parameters], groups, hooks)
        for stage in pipeline.stages:
            stage.observer = self

    def action_ended(self) -> None:
        self._reducer.proceed()

    def gradients_complete(self, stage: int, unit: int) -> None:
        if self._choice is None or self._choice.early:
            number = self._groups[stage, unit]
            self._reducer.group_done(number, local_gradients(self._parameters[number]))

    def backward_done(self, stage: int) -> None:
        self._incomplete.discard(stage)
        if not self._incomplete:
            self._incomplete.update(self._stages)
            if self._choice is not None:
                self._choice.step_ended(time.perf_counter())
                self._reducer.defer(not self._choice.early)
