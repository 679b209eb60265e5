"""Groups the gradients of a step into buckets and decides when each is sent, if possible during the backward pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from hpctrain.records.plan.compression import BUCKET_BYTES


class GradientReadyTracker:
    """Tracks which parameters have received the last addition to their gradient in this step.

    The first step counts the additions: one per micro-batch, none for parameters that the loss does not depend on. The
    count is the same in all other steps, because the schedule is.
    """

    def __init__(self, parameters: list[nn.Parameter], on_ready: Callable[[GradientReadyTracker], None]) -> None:
        self.ready = [False] * len(parameters)
        """[index of a parameter] -> whether its gradient is finished; all False in the first step."""
        self._parameters = parameters
        self._on_ready = on_ready
        self._additions = [0] * len(parameters)
        self._expected: list[int] | None = None

    def register_hooks(self) -> None:
        """Count every addition from now on, and call `on_ready` whenever a gradient is finished."""
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._count_addition(index))

    def gradient(self, index: int) -> Tensor:
        """Return the gradient of the parameter with this index."""
        grad = self._parameters[index].grad
        assert grad is not None, "asked for once it is complete"
        return grad

    def next_step(self) -> None:
        """Reset the counts for the next step.

        Raises:
            RuntimeError: something was added to a gradient after it counted as finished, so a wrong value was sent.
        """
        if self._expected is None:
            self._expected = self._additions
        elif any(now > then for now, then in zip(self._additions, self._expected, strict=True)):
            raise RuntimeError("the backward pass added to a gradient more often than in the first step")
        self._additions = [0] * len(self._parameters)
        self.ready = [False] * len(self._parameters)

    def _count_addition(self, index: int) -> None:
        self._additions[index] += 1
        if self._expected is not None and self._additions[index] == self._expected[index]:
            self.ready[index] = True
            self._on_ready(self)


class BucketScheduler:
    """Sends the buckets of each step in the same order on every rank, whichever bucket is ready first."""

    def __init__(self, send: Callable[[int, list[Tensor]], None], bucket_bytes: int = BUCKET_BYTES) -> None:
        """
        Args:
            send: called with the number of a bucket, counted from 0 in each step, and its gradients.
            bucket_bytes: largest size of a bucket; a larger gradient is a bucket of its own.
        """
        self._send = send
        self._bucket_bytes = bucket_bytes
        self._sent = 0
        """Number of buckets sent in this step."""
        self._ready_tracker: GradientReadyTracker | None = None
        self.buckets: list[list[int]] = []
        """Indices into the list of gradients, by bucket in sending order; empty before the first step."""

    def register_hooks(self, parameters: list[nn.Parameter]) -> None:
        """Send a bucket as soon as the backward pass has finished its gradients, from the second step on.

        Args:
            parameters: in the order in which `send_remaining` gets their gradients.
        """
        self._ready_tracker = GradientReadyTracker(parameters, self._send_ready)
        self._ready_tracker.register_hooks()

    def send_remaining(self, gradients: list[Tensor]) -> None:
        """Send the buckets that were not sent during the backward pass, and prepare for the next step.

        Raises:
            RuntimeError: a gradient was added to after it was sent.
        """
        if not self.buckets:
            self.buckets = bucket_indices(gradients, self._bucket_bytes)
        for bucket in self.buckets[self._sent :]:
            self._send_bucket([gradients[index] for index in bucket])
        self._sent = 0
        if self._ready_tracker is not None:
            self._ready_tracker.next_step()

    def _send_ready(self, tracker: GradientReadyTracker) -> None:
        for bucket in self.buckets[self._sent :]:
            if not all(tracker.ready[index] for index in bucket):
                return
            self._send_bucket([tracker.gradient(index) for index in bucket])

    def _send_bucket(self, tensors: list[Tensor]) -> None:
        self._send(self._sent, tensors)
        self._sent += 1


def unflatten_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat tensor, in the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def bucket_indices(gradients: list[Tensor], limit_bytes: int) -> list[list[int]]:
    """Return the buckets as lists of gradient indices, the last gradients first, because a backward pass finishes them
    first.
    """
    indices = list(range(len(gradients)))[::-1]
    groups = group_into_buckets([gradients[index] for index in indices], limit_bytes)
    return [[indices.pop(0) for _ in group] for group in groups]


def group_into_buckets(tensors: list[Tensor], limit_bytes: int) -> list[list[Tensor]]:
    """Return consecutive tensors of one dtype, grouped up to `limit_bytes`; a larger tensor is a bucket of its own."""
    groups: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if groups and size + bytes_ <= limit_bytes and groups[-1][0].dtype == tensor.dtype:
            groups[-1].append(tensor)
            size += bytes_
        else:
            groups.append([tensor])
            size = bytes_
    return groups
