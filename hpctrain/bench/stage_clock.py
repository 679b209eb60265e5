"""Forward and backward time of each stage, from the counters that every stage keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.parallel.pipeline import Pipeline
from hpctrain.parallel.stage import CountedStage, StageCounters


class StageClock:
    """Tells a stage's forward seconds from the rest, by looking at its counter around each forward."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._forward_s = {stage.stage_index: 0.0 for stage in pipeline.stages}
        self._total_s = dict(self._forward_s)
        for stage in pipeline.stages:
            self._watch(stage)
        self._keep_totals(pipeline)

    def take(self, stages: int, micro_batches: int) -> tuple[Tensor, Tensor]:
        """Seconds a micro-batch since the last call, [stages] each: forward; loss and backward. Others' stages: 0."""
        forward, backward = torch.zeros(stages, dtype=torch.float64), torch.zeros(stages, dtype=torch.float64)
        for index, seconds in self._forward_s.items():
            forward[index] = seconds / micro_batches
            backward[index] = (self._total_s[index] - seconds) / micro_batches
            self._forward_s[index] = self._total_s[index] = 0.0
        return forward, backward

    def _watch(self, stage: CountedStage) -> None:
        forward, index = stage.forward_one_chunk, stage.stage_index

        def timed_forward(*args: Any, **kwargs: Any) -> Any:
            before = stage.counters.compute_s
            result = forward(*args, **kwargs)
            self._forward_s[index] += stage.counters.compute_s - before
            return result

        stage.forward_one_chunk = timed_forward  # type: ignore[method-assign]

    def _keep_totals(self, pipeline: Pipeline) -> None:
        take = pipeline.take_counters

        def kept() -> dict[int, StageCounters]:
            taken = take()
            for index, counters in taken.items():
                self._total_s[index] += counters.compute_s
            return taken

        pipeline.take_counters = kept  # type: ignore[method-assign]
