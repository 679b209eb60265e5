"""Groups the gradients of a step into buckets and decides when each bucket is sent, if possible during the backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from hpctrain.records.plan.compression import BUCKET_BYTES


class BucketScheduler:
    """Sends the buckets of each step in the same order on every rank, whichever bucket is ready first.

    With `register_hooks`, buckets are sent while the backward pass still runs. The first step counts the additions to
    each gradient: one per micro-batch, none for parameters that the loss does not depend on. Every step has the same
    schedule and so the same counts. From the second step on, a gradient is ready when its count is reached.
    """

    def __init__(self, send: Callable[[int, list[Tensor]], None], bucket_bytes: int = BUCKET_BYTES) -> None:
        """Create the scheduler before the first step.

        Args:
            send: called with the number of a bucket, counted from 0 in each step, and its gradients.
            bucket_bytes: largest size of a bucket; a larger gradient is a bucket of its own.
        """
        self._send = send
        self._bucket_bytes = bucket_bytes
        self._sent = 0
        """Count of buckets sent in the current step."""
        self.buckets: list[list[int]] = []
        """Indices into the list of gradients, by bucket in sending order; empty before the first step."""
        self._parameters: list[nn.Parameter] = []
        self._additions: list[int] = []
        """[index of a parameter] -> additions to its gradient in the current step."""
        self._expected: list[int] | None = None
        """The additions to each gradient in the first step; None during the first step."""

    def register_hooks(self, parameters: list[nn.Parameter]) -> None:
        """Register hooks that send each bucket as soon as the backward pass has finished its gradients, from the second
        step on.

        Args:
            parameters: in the order in which `send_remaining` gets their gradients.
        """
        self._parameters = parameters
        self._additions, self._expected = [0] * len(parameters), None
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._count_addition(index))

    def send_remaining(self, gradients: list[Tensor]) -> None:
        """Send the buckets that were not sent during the backward pass, and prepare for the next step.

        Args:
            gradients: all gradients of the step, in the same order in every step.

        Raises:
            RuntimeError: a gradient was added to after it was sent.
        """
        if not self.buckets:
            self.buckets = bucket_indices(gradients, self._bucket_bytes)
        for bucket in self.buckets[self._sent :]:
            self._send_bucket([gradients[index] for index in bucket])
        self._sent = 0
        if self._expected is None:
            self._expected = self._additions
        elif any(now > then for now, then in zip(self._additions, self._expected, strict=True)):
            raise RuntimeError("the backward pass added to a gradient more often than in the first step")
        self._additions = [0] * len(self._parameters)

    def _count_addition(self, index: int) -> None:
        self._additions[index] += 1
        expected = self._expected
        if expected is None or self._additions[index] != expected[index]:
            return
        for bucket in self.buckets[self._sent :]:
            if not all(0 < expected[member] <= self._additions[member] for member in bucket):
                return
            self._send_bucket([self._gradient(member) for member in bucket])

    def _gradient(self, index: int) -> Tensor:
        grad = self._parameters[index].grad
        assert grad is not None, "asked for once it is complete"
        return grad

    def _send_bucket(self, tensors: list[Tensor]) -> None:
        self._send(self._sent, tensors)
        self._sent += 1


def unflatten_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat tensor, one in the shape of each of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def bucket_indices(gradients: list[Tensor], limit_bytes: int) -> list[list[int]]:
    """Return the buckets as lists of indices into `gradients`, each of at most `limit_bytes`.

    The last gradients come first, because a backward pass finishes them first. A larger gradient is a bucket of its
    own.
    """
    indices = list(range(len(gradients)))[::-1]
    groups = group_into_buckets([gradients[index] for index in indices], limit_bytes)
    return [[indices.pop(0) for _ in group] for group in groups]


def group_into_buckets(tensors: list[Tensor], limit_bytes: int) -> list[list[Tensor]]:
    """Return the tensors in groups of consecutive tensors of one dtype, each of at most `limit_bytes`.

    A larger tensor is a group of its own.
    """
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
