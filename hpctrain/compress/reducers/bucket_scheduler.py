"""Puts the gradients of a step into buckets and decides when each bucket is sent, if possible during the backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from hpctrain.records.plan.compression import BUCKET_BYTES


class BucketScheduler:
    """Sends the buckets of each step in the same order on every rank, whichever bucket is ready first.

    After `overlap`, buckets are sent before the end of the pipeline. The first step counts the additions to each
    gradient: one per micro-batch, none for parameters that the loss does not depend on. Every step has the same
    schedule and so the same counts. From the second step on, a gradient is ready when its count is reached; in every
    step it is ready when its group is done.
    """

    def __init__(
        self,
        send: Callable[[int, list[Tensor]], None],
        bucket_bytes: int = BUCKET_BYTES,
        make_room: Callable[[], bool] = lambda: True,
        kinds: Sequence[Hashable] = (),
    ) -> None:
        """Create the scheduler before the first step.

        Args:
            send: called with the number of a bucket, counted from 0 in each step, and its gradients.
            bucket_bytes: largest size of a bucket; a larger gradient is a bucket of its own.
            make_room: makes room for a bucket if that needs no wait for other ranks, and returns whether there is room.
                Before `send_remaining`, no bucket is sent while it returns False.
            kinds: for each gradient, something that the gradients of a bucket have in common, as their codec; empty:
                all gradients may share buckets.
        """
        self._send = send
        self._bucket_bytes = bucket_bytes
        self._make_room = make_room
        self._kinds = kinds
        self.is_deferred = False
        """Whether buckets wait for `send_remaining`, in spite of `overlap`."""
        self._sent = 0
        """Count of buckets sent in the current step."""
        self.buckets: list[list[int]] = []
        """Indices into the list of gradients, by bucket in sending order; empty before the first step, unless `overlap`
        was called."""
        self._groups: list[list[int]] = []
        self._done: dict[int, Tensor] = {}
        """Index -> gradient, for the groups that are done in the current step."""
        self._parameters: Sequence[Tensor] = ()
        self._additions: list[int] = []
        """[index of a parameter] -> additions to its gradient in the current step."""
        self._expected: list[int] | None = None
        """The additions to each gradient in the first step; None during the first step."""

    def overlap(
        self, parameters: Sequence[Tensor], groups: Sequence[Sequence[int]] | None = None, hooks: bool = True
    ) -> None:
        """Send buckets before `send_remaining` from now on.

        Args:
            parameters: in the order in which `send_remaining` gets their gradients, and in the gradients' shapes.
            groups: indices of the parameters of each group, in the order in which groups are sent; None: all parameters
                are one group. A bucket has gradients of one group. Gradients in no group are sent last, by
                `send_remaining`.
            hooks: whether a bucket is sent as soon as the backward pass has finished its gradients, from the second
                step on; otherwise only when its group is done.
        """
        self._parameters = parameters
        self._groups = [list(group) for group in (groups if groups is not None else [range(len(parameters))])]
        grouped = frozenset(index for group in self._groups for index in group)
        last = [index for index in range(len(parameters)) if index not in grouped]
        for group in [*self._groups, last]:
            self.buckets += self._bucket_indices(group, parameters)
        self._additions, self._expected = [0] * len(parameters), None
        for index in grouped if hooks else ():
            parameters[index].register_post_accumulate_grad_hook(lambda _, index=index: self._count_addition(index))

    def group_done(self, number: int, gradients: list[Tensor]) -> None:
        """Send the gradients of a group, to which nothing adds any more in this step, when it is their turn.

        Args:
            number: index of the group in `groups`.
            gradients: all its gradients, in the order of its indices.
        """
        self._done |= zip(self._groups[number], gradients, strict=True)
        self.proceed()

    def proceed(self) -> None:
        """Send the buckets that are ready and whose turn it is, without waiting for other ranks."""
        if self.is_deferred:
            return
        while self._sent < len(self.buckets) and self._is_ready(self.buckets[self._sent]) and self._make_room():
            self._send_bucket([self._gradient(member) for member in self.buckets[self._sent]])

    def send_remaining(self, gradients: list[Tensor]) -> None:
        """Send the buckets that were not sent before, and prepare for the next step.

        Args:
            gradients: all gradients of the step, in the same order in every step.

        Raises:
            RuntimeError: a gradient was added to after it was sent.
        """
        if not self.buckets:
            self.buckets = self._bucket_indices(range(len(gradients)), gradients)
        for bucket in self.buckets[self._sent :]:
            self._send_bucket([gradients[index] for index in bucket])
        self._sent = 0
        self._done.clear()
        if self._expected is None:
            self._expected = self._additions
        elif any(now > then for now, then in zip(self._additions, self._expected, strict=True)):
            raise RuntimeError("the backward pass added to a gradient more often than in the first step")
        self._additions = [0] * len(self._parameters)

    def _bucket_indices(self, group: Sequence[int], gradients: Sequence[Tensor]) -> list[list[int]]:
        """Return the buckets of a group of gradients, the one first whose gradients a backward pass finishes first."""
        by_kind: dict[Hashable, list[int]] = {}
        for index in group:
            by_kind.setdefault(self._kinds[index] if self._kinds else None, []).append(index)
        buckets = [
            [members[member] for member in bucket]
            for members in by_kind.values()
            for bucket in bucket_indices([gradients[index] for index in members], self._bucket_bytes)
        ]
        place = {index: number for number, index in enumerate(group)}
        return sorted(buckets, key=lambda bucket: place[bucket[-1]], reverse=True)

    def _count_addition(self, index: int) -> None:
        self._additions[index] += 1
        if self._expected is not None and self._additions[index] == self._expected[index]:
            self.proceed()

    def _is_ready(self, bucket: list[int]) -> bool:
        expected, additions = self._expected, self._additions
        return all(
            member in self._done or (expected is not None and 0 < expected[member] <= additions[member])
            for member in bucket
        )

    def _gradient(self, index: int) -> Tensor:
        if index in self._done:
            return self._done[index]
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
