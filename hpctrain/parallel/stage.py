"""A pipeline stage that counts what it does: compute seconds, forwards, bytes handed to its neighbours."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from hpctrain.parallel.randomness import RandomStream


@dataclass
class StageCounters:
    """What a stage did since the last reset."""

    compute_s: float = 0.0
    """Forward, loss and backward, with the collectives of tensor parallelism in them; no sends, no waiting for any."""
    forwards: int = 0
    sent_bytes: int = 0


class CountedStage(PipelineStage):
    """torch's stage, with counters around computation and sends, and optional autocast around the forward pass."""

    def __init__(self, *args: Any, autocast: torch.dtype | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counters = StageCounters()
        self.random: RandomStream | None = None
        self._autocast = autocast

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.counters.forwards += 1
        if self.random is not None:
            self.random.begin(self.stage_index, args[0])
        enabled = self._autocast is not None
        with self._clock(), torch.autocast(self.device.type, self._autocast, enabled=enabled):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock():
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock():
            return super().backward_weight_one_chunk(*args, **kwargs)

    def timed(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss function, its time counted as this stage's: the schedule calls it outside of the stage."""

        def counted(output: Tensor, target: Tensor) -> Tensor:
            with self._clock():
                return loss(output, target)

        return counted

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._count(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._count(super().get_bwd_send_ops(bwd_chunk_id))

    def _count(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        self.counters.sent_bytes += sum(op.tensor.numel() * op.tensor.element_size() for op in operations)
        return operations

    def _clock(self) -> _Stopwatch:
        return _Stopwatch(self.counters, self.device)


class _Stopwatch:
    """Adds the time of a `with` block to `compute_s`; on CUDA the kernels are waited for."""

    def __init__(self, counters: StageCounters, device: torch.device) -> None:
        self._counters = counters
        self._device = device

    def __enter__(self) -> None:
        self._start = seconds_of(self._device)

    def __exit__(self, *exception: object) -> None:
        self._counters.compute_s += seconds_of(self._device) - self._start


def seconds_of(device: torch.device) -> float:
    """Seconds from some fixed moment until now, when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
