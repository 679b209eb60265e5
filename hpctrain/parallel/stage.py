"""A pipeline stage that counts compute seconds, forwards and bytes sent to its neighbours.

The stage also records its current operation, for a profile and for the diagnosis of hangs. Times are taken without
waiting for the device: a wait between two actions would end the overlap of computation with sends and with sums over
replicas.

The random numbers that a model draws (dropout) depend only on the position in the training, without stored state.
Before every forward of a micro-batch the generators are seeded by (seed, step, replica, stage, micro-batch). So a
resumed run draws the numbers of an uninterrupted one, and the schedule's order of micro-batches does not matter.
Replicas draw different numbers, and the devices of a tensor-parallel group draw equal ones. With another cut of the
model or of the batch, the numbers differ but come from the same distribution.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.activation_codec import BoundaryCodec, build_activation_codec
from hpctrain.parallel.tracked_work import TrackedWork
from hpctrain.records.plan.gradient_codec import Messages

Mark = float | torch.cuda.Event
"""A point in time: on a CPU in seconds; on CUDA as the event that the current stream records there."""


Span = tuple[str, Mark, Mark]
"""(name of a counter, start, end) of a time span to add to the counter."""


def mark(device: torch.device) -> Mark:
    """Return the present moment: on a CPU the time now; on CUDA the time at which the stream has done all work queued
    so far.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds from one mark to the other. On CUDA, wait until the device has reached the second mark."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float), "marks of one device are of one kind"
        assert isinstance(end, float), "marks of one device are of one kind"
        return end - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@contextmanager
def stopwatch(spans: list[Span], part: str, device: torch.device, operation: str) -> Iterator[None]:
    """Append the time span of a `with` block to `spans`, and record its operation in `ACTIVITY`.

    Args:
        spans: the stage's time spans.
        part: 'forward' or 'backward': the counter of seconds to which the span belongs.
        device: the stage's device.
        operation: text that is recorded, as 'forward stage 0 mb 1'.
    """
    with ACTIVITY.doing(operation):
        start = mark(device)
        try:
            yield
        finally:
            spans.append((f"{part}_s", start, mark(device)))


@dataclass
class RandomStream:
    """Seeds torch's generators before each forward by seed, step, replica, stage and micro-batch, for dropout."""

    seed: int
    replica: int
    device: torch.device
    step: int = 0
    """Number of steps done; the training loop updates it."""

    def begin(self, stage: int, micro_batch: int) -> None:
        """Seed torch's generators for the forward of this stage and micro-batch in the present step; call it before
        each such forward."""
        value = stream_seed(self.seed, self.step, self.replica, stage, micro_batch)
        # torch.manual_seed seeds every kind of device and takes 100 us a call; seeding one kind takes 5 us.
        if self.device.type == "cuda":
            torch.cuda.manual_seed(value)
        torch.default_generator.manual_seed(value)


def stream_seed(seed: int, step: int, replica: int, stage: int, micro_batch: int) -> int:
    """Return the 63-bit seed of a stage's forward of a micro-batch: a hash, so that neighbouring arguments give
    unrelated seeds.
    """
    packed = struct.pack("<Qqqqq", seed, step, replica, stage, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class StageObserver(Protocol):
    """Interface of an object that follows what a stage does in a training step."""

    def action_ended(self) -> None:
        """Take note that the stage has ended a forward or backward pass of a micro-batch."""

    def gradients_complete(self, stage: int, unit: int) -> None:
        """Take note that nothing adds to the gradients of a unit any more in this step.

        Args:
            stage: number of the stage.
            unit: number of the unit in `InstrumentedStage.parameters_of_units`.
        """

    def backward_done(self, stage: int) -> None:
        """Take note that a stage has done its last backward pass of the step.

        Args:
            stage: number of the stage.
        """


PostSends = Callable[[list[dist.P2POp]], list[dist.Work]]
"""Function that starts sends as torch's schedules do, and returns them as pending works."""


@dataclass
class StageCounters:
    """Figures of a stage, counted since `take_counters` was last called."""

    forward_s: float = 0.0
    """Seconds of forward and loss, including collectives of tensor parallelism and sharding and the coding of
    compressed stage messages, without sends and receives."""
    backward_s: float = 0.0
    """Seconds of the backward pass, whole or in two actions.

    They include collectives of tensor parallelism and sharding, and the coding of compressed stage messages. If
    gradients are sent during the backward pass, they also include the time to copy and encode these gradients.
    """
    forwards: int = 0
    """Number of forward passes, one for each micro-batch."""
    sent_bytes: int = 0
    """Bytes of stage messages that this rank sent, after compression."""
    sharding_bytes: int = 0
    """Bytes that this rank sent to gather sharded weights and to sum gradients into shards."""

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


class InstrumentedStage(PipelineStage):
    """torch's pipeline stage, which also counts seconds of computation and bytes sent (`StageCounters`), and can run
    the forward pass under autocast.
    """

    def __init__(
        self,
        *args: Any,
        post: PostSends,
        message_timeout: timedelta | None = None,
        most_sends: tuple[int, int] | None = None,
        autocast: torch.dtype | None = None,
        before: Messages = "none",
        behind: Messages = "none",
        **kwargs: Any,
    ) -> None:
        """Create the stage; other arguments go to torch's `PipelineStage`.

        Args:
            post: starts sends.
            message_timeout: how long to wait for a stage message; None: the timeout of its process group.
            most_sends: how many gradients for the previous stage, and how many outputs for the next one, may be on
                their way; before a further one, the stage waits for the oldest. None: all of a step, as on CUDA, where
                such a wait would hold up the computation.
            autocast: dtype of matrix products in the forward pass; None: no autocast.
            before: encoding of messages from and to the previous stage in training; evaluation sends them in fp32.
            behind: encoding of messages from and to the next stage in training; evaluation sends them in fp32.
        """
        super().__init__(*args, **kwargs)
        self.counters = StageCounters()
        """Counters since `take_counters` was last called, which adds the times to them."""
        self._spans: list[Span] = []
        self._post = post
        self._message_timeout = message_timeout
        self.random: RandomStream | None = None
        self.observer: StageObserver | None = None
        self._autocast = autocast
        self._losses: dict[int, Tensor | None] = {}
        self._sends: dict[str, list[TrackedWork]] = {"backward": [], "forward": []}
        self._most_sends = None if most_sends is None else dict(zip(self._sends, most_sends, strict=True))
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
            if not torch.is_grad_enabled():
                self.fwd_cache.clear()  # torch would keep the outputs of all micro-batches for backward passes
            try:
                output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:
                # torch wraps the model's own error in one that says only "failed to run forward".
                raised = error.__cause__ if "failed to run forward" in str(error) else None
                if raised is None:
                    raise
                raise raised from None
        if not torch.is_grad_enabled():
            self._drop(fwd_chunk_id)
        self._action_ended()
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        part = "backward" if kwargs.get("full_backward", True) else "backward of inputs,"
        with self._clock("backward", f"{part} stage {self.stage_index} mb {bwd_chunk_id}"):
            if self._behind is not None:
                self._behind.read(bwd_chunk_id)
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._losses[bwd_chunk_id] = kwargs.get("loss")
        if kwargs.get("full_backward", True):
            self._drop(bwd_chunk_id)
        self._action_ended()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._clock("backward", f"backward of weights, stage {self.stage_index} mb {bwd_chunk_id}"):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._drop(bwd_chunk_id)
        self._action_ended()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Tell the observer that the gradients are complete. torch calls this method after the stage's last backward of
        a step, when the gradient for the stage before is already sent.

        Args:
            grad_scale_factor: number by which torch's method of this name divides the gradients.
        """
        super().perform_reduce_grad(grad_scale_factor)
        self.backward_done()

    def backward_done(self) -> None:
        """Tell the observer that the last backward pass of the step has added to this stage's gradients."""
        if self.observer is not None:
            self.observer.gradients_complete(self.stage_index, 0)
            self.observer.backward_done(self.stage_index)

    def parameters_of_units(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each unit of the stage, which get complete gradients together."""
        return [list(self.submod.parameters())]

    def _action_ended(self) -> None:
        if self.observer is not None:
            self.observer.action_ended()

    def timed(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss function with its time counted as forward, because the schedule calls the loss outside of the
        stage.
        """

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
        self._make_buffers(self.args_recv_info[fwd_chunk_id], wants_gradient=torch.is_grad_enabled())
        return self._receive(fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id), self._before)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_buffers(self.grad_recv_info[bwd_chunk_id], wants_gradient=False)
        return self._receive(bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id), self._behind)

    def take_counters(self) -> StageCounters:
        """Return the counters since the last call, and restart them. On CUDA, wait until the device has done the
        counted work.
        """
        spans, self._spans = self._spans, []
        for part, start, end in spans:
            setattr(self.counters, part, getattr(self.counters, part) + seconds_between(start, end))
        taken, self.counters = self.counters, StageCounters()
        return taken

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # With these messages torch 2.11 opens connections before its first pass, also to this rank, which gloo refuses.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    # torch makes buffers for the received messages of all micro-batches before the first step, and keeps them. A stage
    # has only those that its schedule needs at one moment, so memory does not grow with the micro-batches of a step.

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        self._drop(*range(num_microbatches))
        return prepared

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        self._drop(*range(num_microbatches))
        return prepared

    def _drop(self, *micro_batches: int) -> None:
        """Free what is left of micro-batches after the backward pass. Meta tensors take the place of the input and of
        the output's gradient, also if a stage of the same rank passed them on. The loss leaves its graph, which would
        hold activations as long as torch keeps the loss: to the end of the step."""
        for micro_batch in micro_batches:
            if (loss := self._losses.pop(micro_batch, None)) is not None:
                loss.detach_()
            for info in (*self.args_recv_info.get(micro_batch, ()), *self.grad_recv_info.get(micro_batch, ())):
                if isinstance(buffer := getattr(info, "buffer", None), Tensor):
                    info.buffer = torch.empty_like(buffer, device="meta")

    def _make_buffers(self, infos: Iterable[Any], wants_gradient: bool) -> None:
        """Put new buffers in place of the meta tensors of messages that are about to be received.

        Args:
            infos: torch's records of the messages.
            wants_gradient: whether the backward pass needs a gradient of the messages.
        """
        for info in infos:
            if isinstance(buffer := getattr(info, "buffer", None), Tensor):
                info.buffer = torch.empty_like(buffer, device=self.device, requires_grad=wants_gradient)

    def finish_sends(self) -> None:
        """Wait until all sends of this stage are complete.

        Raises:
            RuntimeError: a send failed, or on a CPU took longer than the timeout.
        """
        for sends in self._sends.values():
            while sends:
                sends.pop(0).wait()

    def _send(self, what: str, operations: list[dist.P2POp], to: BoundaryCodec | None, part: str) -> list[dist.P2POp]:
        """Start sends, and return an empty list, so that torch's schedule sends nothing.

        The stage starts the sends itself, because it knows their content and receiver and can put them into the
        activity record.

        Args:
            what: what is sent, as 'output of stage 0 mb 1', for the operation's name in the activity record.
            operations: the sends, all to one rank.
            to: codec of the messages to the receiver; None: they are not compressed.
            part: 'forward' or 'backward': what is sent, and the counter to which the encoding of messages is added.
        """
        if not operations:
            return []
        sends = self._sends[part]
        while self._most_sends is not None and len(sends) >= self._most_sends[part]:
            sends.pop(0).wait()
        if to is not None and self.submod.training:
            with self._clock(part, f"write {what}"):
                operations = to.encode_sends(operations)
        self.counters.sent_bytes += sum(op.tensor.numel() * op.tensor.element_size() for op in operations)
        operation = f"send {what} to rank {operations[0].peer}"
        with ACTIVITY.doing(operation, waits="pp"):
            sends.append(TrackedWork(self._post(operations), operation, self._message_timeout))
        return []

    def _receive(self, chunk: int, operations: list[dist.P2POp], of: BoundaryCodec | None) -> list[dist.P2POp]:
        return of.receive_encoded(chunk, operations) if of is not None and self.submod.training else operations

    def _clock(self, part: str, operation: str) -> AbstractContextManager[None]:
        return stopwatch(self._spans, part, self.device, operation)
