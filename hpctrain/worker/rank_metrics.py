"""Where the time of each rank goes: measured on each rank, gathered with the figures of a step, and written by rank 0
as means over several steps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from hpctrain.base.activity import ACTIVITY, WaitsFor
from hpctrain.base.atomic import append_line
from hpctrain.base.errors import StorageError
from hpctrain.records.history.rank_log import RANK_LOG, RankRow
from hpctrain.worker.build import Trainer

WAITS = (*(f"wait_{kind}_s" for kind in get_args(WaitsFor)), "hidden_dp_s")
"""Names of the figures of `own_waits`."""
LEAST_STEPS = 10
"""Fewest steps of a mean."""
RANKS_A_STEP = 4
"""Most lines of metrics-ranks.jsonl a step, as a mean: with more ranks, the means are over more steps."""


def own_waits() -> dict[str, float]:
    """Return name of a figure -> seconds in which this rank waited, or hid a message behind its computation, since the
    last call."""
    waited = ACTIVITY.take_waits()
    seconds = {f"wait_{kind}_s": waited.get(kind, 0.0) for kind in get_args(WaitsFor)}
    return seconds | {"hidden_dp_s": ACTIVITY.take_hidden_s()}


@dataclass(frozen=True)
class StepTimesByRank:
    """Where each rank's time went in a step."""

    passes: Tensor
    """[ranks, 2, stages], fp64: seconds of the forward and of the backward passes of each stage on each rank."""
    figures: Mapping[str, Tensor]
    """Name in `WAITS`, or memory_bytes -> [ranks], fp64."""


class RankMetrics:
    """Adds up the times of the ranks on rank 0, and writes their means. Lines that cannot be written are lost."""

    def __init__(self, trainer: Trainer) -> None:
        plan = trainer.plan
        self._path = trainer.folder / RANK_LOG
        self._fence = trainer.fence
        owner = plan.stage_owner()
        self._devices = plan.ranks
        self._stages = {
            rank: [stage for stage in owner if owner[stage] == pipeline_rank]
            for pipeline_rank, column in enumerate(plan.mesh())
            for row in column
            for rank in row
        }
        self._generation = trainer.generation
        self._every = max(LEAST_STEPS, -(-plan.world_size // RANKS_A_STEP))
        self._times: list[StepTimesByRank] | None = None

    def add(self, step: int, times: StepTimesByRank) -> None:
        """Add the times of a step. Those of the generation's first step are left out.

        Args:
            step: number of the step.

        Raises:
            Superseded: the generation is over.
        """
        if self._times is None:
            self._times = []
            return
        self._times.append(times)
        if len(self._times) >= self._every:
            lines = [json.dumps(row.to_json(), allow_nan=False) for row in self._rows(step, self._times)]
            self._times = []
            self._fence.check()
            with contextlib.suppress(StorageError):  # the training is worth more than these figures
                append_line(self._path, "\n".join(lines))

    def _rows(self, step: int, times: list[StepTimesByRank]) -> list[RankRow]:
        passes = torch.stack([each.passes for each in times]).mean(0).tolist()
        means = {name: torch.stack([each.figures[name] for each in times]).mean(0).tolist() for name in WAITS}
        memory = torch.stack([each.figures["memory_bytes"] for each in times]).amax(0).tolist()
        return [
            RankRow(
                step=step, steps=len(times), generation=self._generation, rank=rank, device=device,
                stages=(stages := self._stages[rank]),
                forward_s=[round(passes[rank][0][stage], 6) for stage in stages],
                backward_s=[round(passes[rank][1][stage], 6) for stage in stages],
                **{name: round(mean[rank], 6) for name, mean in means.items()},
                memory_bytes=memory[rank],
            )
            for rank, device in enumerate(self._devices)
        ]  # fmt: skip
