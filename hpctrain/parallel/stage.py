"""A pipeline stage that counts what it does: compute seconds, forwards, bytes handed to its neighbours. It says what it
is at, for a profile and for whoever asks why nothing moves."""

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
from hpctrain.records.plan.compression import Messages

PostSends = Callable[[list[dist.P2POp]], list[dist.Work]]
"""Starts sends as torch's schedules start theirs."""


@dataclass
class StageCounters:
    """What a stage did since the last reset."""

    forward_s: float = 0.0
    """Forward and loss, with the collectives of tensor parallelism and sharding in them, and with writing and reading
    messages in fewer bytes; no sends and no receives."""
    backward_s: float = 0.0
    """Backward, in one piece or in two, likewise; where gradients are summed beside it, with its waits for a sum on the
    way whose memory the next one needs."""
    forwards: int = 0
    sent_bytes: int = 0
    sharding_bytes: int = 0
    """Sent to gather sharded weights and to sum gradients into shards."""

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
            before: how messages from and to the stage before travel in training; evaluation sends all in full.
            behind: the same of the stage behind.
        """
        super().__init__(*args, **kwargs)
        self.counters = StageCounters()
        """What was done since they were taken; its times are added then."""
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
                # torch wraps what the model raised in an error that says no more than "failed to run forward".
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
        """The loss function, its time counted as this stage's: the schedule calls it outside of the stage."""

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
        """What was done since the last call; on CUDA it waits until the device has done it."""
        spans, self._spans = self._spans, []
        for part, start, end in spans:
            setattr(self.counters, part, getattr(self.counters, part) + seconds_between(start, end))
        taken, self.counters = self.counters, StageCounters()
        return taken

    def finish_sends(self) -> None:
        """Wait until the neighbours have taken what was sent to them."""
        while self._sends:
            self._sends.pop(0).wait()

    def _send(self, what: str, operations: list[dist.P2POp], to: BoundaryCodec | None, part: str) -> list[dist.P2POp]:
        """Send here instead of in the schedule, which is left nothing to do: here it is known what is sent where.

        Args:
            part: forward or backward, whose time it is to write messages in fewer bytes.
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
"""A counter's name, and start and end of what counts for it."""


class _Stopwatch:
    """Notes the span of a `with` block for the stage's forward or backward."""

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
