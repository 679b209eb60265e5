"""A pipeline stage that counts compute seconds, forwards and bytes sent to its neighbours.

It also records its current operation, for a profile and for the diagnosis of hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.activation_codec import build_activation_codec
from hpctrain.parallel.boundary_codec import BoundaryCodec
from hpctrain.parallel.device_time import Mark, mark, seconds_between
from hpctrain.parallel.random_stream import RandomStream
from hpctrain.parallel.tracked_work import TrackedWork
from hpctrain.records.plan.gradient_codec import Messages

PostSends = Callable[[list[dist.P2POp]], list[dist.Work]]
"""Function that starts sends as torch's schedules do."""


@dataclass
class StageCounters:
    """Counters of a stage since they were last read with `take_counters`."""

    forward_s: float = 0.0
    """Seconds of forward and loss, including collectives of tensor parallelism and sharding and the coding of
    compressed stage messages, without sends and receives."""
    backward_s: float = 0.0
    """Seconds of the backward pass, whole or in two actions.

    They include collectives of tensor parallelism and sharding, and the coding of compressed stage messages. If
    gradients are summed during the backward pass, waits for a sum whose buffer the next sum needs are included.
    """
    forwards: int = 0
    sent_bytes: int = 0
    sharding_bytes: int = 0
    """Bytes that this rank sent to gather sharded weights and to sum gradients into shards."""

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


class InstrumentedStage(PipelineStage):
    """torch's stage, with counters around computation and sends, and optional autocast around the forward pass."""

    def __init__(
        self,
        *args: Any,
        post: PostSends,
        message_timeout: timedelta | None = None,
        autocast: torch.dtype | None = None,
        before: Messages = "none",
        behind: Messages = "none",
        **kwargs: Any,
    ) -> None:
        """
        Args:
            before: how messages from and to the previous stage travel in training; evaluation does not compress them.
            behind: how messages from and to the next stage travel in training.
        """
        super().__init__(*args, **kwargs)
        self.counters = StageCounters()
        """Counters since the last `take_counters`, which adds the times."""
        self._spans: list[_Span] = []
        self._post = post
        self._message_timeout = message_timeout
        self.random: RandomStream | None = None
        self._autocast = autocast
        self._sends: list[TrackedWork] = []
        self._before, self._behind = (
            None if code is None else BoundaryCodec(code)
            for code in (build_activation_codec(before), build_activation_codec(behind))
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.counters.forwards += 1
        if self.random is not None:
            self.random.begin(self.stage_index, fwd_chunk_id)
        enabled = self._autocast is not None
        with (
            self._clock("forward", f"forward stage {self.stage_index} mb {fwd_chunk_id}"),
            torch.autocast(self.device.type, self._autocast, enabled=enabled),
        ):
            if self._before is not None:
                self._before.read(fwd_chunk_id)
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:
                # torch wraps the model's own error in one that says only "failed to run forward".
                raised = error.__cause__ if "failed to run forward" in str(error) else None
                if raised is None:
                    raise
            raise raised

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        part = "backward" if kwargs.get("full_backward", True) else "backward of inputs,"
        with self._clock("backward", f"{part} stage {self.stage_index} mb {bwd_chunk_id}"):
            if self._behind is not None:
                self._behind.read(bwd_chunk_id)
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._clock("backward", f"backward of weights, stage {self.stage_index} mb {bwd_chunk_id}"):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def timed(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss function with timing, because the schedule calls it outside of the stage."""

        def counted(output: Tensor, target: Tensor) -> Tensor:
            with self._clock("forward", "loss"):
                return loss(output, target)

        return counted

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        what = f"output of stage {self.stage_index} mb {fwd_chunk_id}"
        return self._send(what, super().get_fwd_send_ops(fwd_chunk_id), self._behind, "forward")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        what = f"gradient for stage {self.stage_index - 1} mb {bwd_chunk_id}"
        return self._send(what, super().get_bwd_send_ops(bwd_chunk_id), self._before, "backward")

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive(fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id), self._before)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive(bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id), self._behind)

    def take_counters(self) -> StageCounters:
        """Return the counters since the last call. On CUDA, wait until the device has done the counted work."""
        spans, self._spans = self._spans, []
        for part, start, end in spans:
            setattr(self.counters, part, getattr(self.counters, part) + seconds_between(start, end))
        taken, self.counters = self.counters, StageCounters()
        return taken

    def finish_sends(self) -> None:
        """Wait until all sends are complete."""
        while self._sends:
            self._sends.pop(0).wait()

    def _send(self, what: str, operations: list[dist.P2POp], to: BoundaryCodec | None, part: str) -> list[dist.P2POp]:
        """Start the sends here, where their content and receiver are known; return an empty list for the schedule to
        send.

        Args:
            part: 'forward' or 'backward': the counter to which the encoding of messages is added.
        """
        if not operations:
            return []
        if to is not None and self.submod.training:
            with self._clock(part, f"write {what}"):
                operations = to.encode_sends(operations)
        self.counters.sent_bytes += sum(op.tensor.numel() * op.tensor.element_size() for op in operations)
        operation = f"send {what} to rank {operations[0].peer}"
        with ACTIVITY.doing(operation, waits=True):
            self._sends.append(TrackedWork(self._post(operations), operation, self._message_timeout))
        return []

    def _receive(self, chunk: int, operations: list[dist.P2POp], of: BoundaryCodec | None) -> list[dist.P2POp]:
        return of.receive_encoded(chunk, operations) if of is not None and self.submod.training else operations

    def _clock(self, part: str, operation: str) -> _Stopwatch:
        return _Stopwatch(self._spans, part, self.device, operation)


_Span = tuple[str, Mark, Mark]
"""(name of a counter, start, end) of a time span to add to the counter."""


class _Stopwatch:
    """Adds the time of a `with` block to the stage's forward or backward seconds."""

    def __init__(self, spans: list[_Span], part: str, device: torch.device, operation: str) -> None:
        self._spans = spans
        self._part = f"{part}_s"
        self._device = device
        self._operation = ACTIVITY.doing(operation)

    def __enter__(self) -> None:
        self._operation.__enter__()
        self._start = mark(self._device)

    def __exit__(self, *exception: Any) -> None:
        self._spans.append((self._part, self._start, mark(self._device)))
        self._operation.__exit__(*exception)
