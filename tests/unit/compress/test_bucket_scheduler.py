"""Which gradients leave when: in one order on every rank, beside the backward pass from the second step on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hpctrain.compress.reducers.bucket_scheduler import BucketScheduler

NUMBERS = 8


def a_model() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((NUMBERS,), float(index + 1))) for index in range(5)]


class Station:
    """Three buckets of at most two gradients: 4 and 3, 2 and 1, 0."""

    def __init__(self) -> None:
        self.parameters = a_model()
        self.sent: list[tuple[int, list[float]]] = []
        self.scheduler = BucketScheduler(self._send, bucket_bytes=2 * 4 * NUMBERS)
        self.scheduler.overlap(self.parameters)

    def step(self, used_last_to_first: list[int], times: int = 1) -> int:
        """Finish gradients in this order, and those of all others never; how many buckets left before the end."""
        self.sent.clear()
        for _ in range(times):
            # Each product's backward comes before those of the products within it.
            total = torch.ones(NUMBERS)
            for index in used_last_to_first[::-1]:
                total = total * self.parameters[index]
            total.sum().backward()
        early = len(self.sent)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.scheduler.send_remaining([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        for parameter in self.parameters:
            parameter.grad = None
        return early

    def _send(self, number: int, tensors: list[Tensor]) -> None:
        self.sent.append((number, [float(tensor[0]) for tensor in tensors]))


def test_buckets_leave_early_from_the_second_step_on_and_always_in_one_order() -> None:
    station = Station()
    assert station.step([4, 3, 2, 1, 0]) == 0, "the first step counts what arrives"
    assert station.scheduler.buckets == [[4, 3], [2, 1], [0]]
    assert station.step([4, 3, 2, 1, 0]) == 3
    assert station.sent == [(0, [24.0, 30.0]), (1, [40.0, 60.0]), (2, [120.0])]
    # Another rank's backward pass may finish them in another order.
    assert station.step([0, 1, 2, 3, 4]) == 3
    assert [number for number, _ in station.sent] == [0, 1, 2]


def test_what_the_loss_does_not_reach_leaves_at_the_end() -> None:
    station = Station()
    station.step([4, 3, 1, 0])
    assert station.step([4, 3, 1, 0]) == 1
    assert [number for number, _ in station.sent] == [0, 1, 2]


def test_a_gradient_leaves_with_the_last_of_its_additions() -> None:
    station = Station()
    station.step([4, 3, 2, 1, 0], times=2)
    assert station.step([4, 3, 2, 1, 0], times=2) == 3
    assert station.sent[0] == (0, [48.0, 60.0])
    with pytest.raises(RuntimeError, match="more often than in the first step"):
        station.step([4, 3, 2, 1, 0], times=3)


def test_gradients_of_different_kinds_share_no_bucket() -> None:
    """Each kind has the buckets that it would have alone; they leave in the order in which their last gradients are
    finished."""
    scheduler = BucketScheduler(lambda number, tensors: None, 2 * 4 * NUMBERS, kinds=["a", "b", "a", "b", "a"])
    scheduler.overlap(a_model())
    assert scheduler.buckets == [[4, 2], [3, 1], [0]]
    scheduler = BucketScheduler(lambda number, tensors: None, 2 * 4 * NUMBERS, kinds=["a", "b", "a", "b", "a"])
    scheduler.overlap(a_model(), [[2, 3, 4], [0]])
    assert scheduler.buckets == [[3], [4, 2], [0], [1]]


def test_groups_leave_in_their_order_when_they_are_done() -> None:
    station = Station()
    station.parameters, station.sent = a_model(), []
    station.scheduler = BucketScheduler(station._send, bucket_bytes=2 * 4 * NUMBERS)
    # Two stages; what is in neither is sent last.
    station.scheduler.overlap(station.parameters, [[2, 3, 4], [0]], hooks=False)
    assert station.scheduler.buckets == [[4, 3], [2], [0], [1]]
    gradients = [torch.full((NUMBERS,), float(index)) for index in range(5)]
    station.scheduler.group_done(1, gradients[:1])
    assert station.sent == [], "it is not its turn"
    station.scheduler.group_done(0, gradients[2:])
    assert station.sent == [(0, [4.0, 3.0]), (1, [2.0]), (2, [0.0])]
    station.scheduler.send_remaining(gradients)
    assert station.sent[3:] == [(3, [1.0])]
    station.scheduler.is_deferred = True
    station.sent.clear()
    station.scheduler.group_done(0, gradients[2:])
    assert station.sent == []
    station.scheduler.send_remaining(gradients)
    assert [number for number, _ in station.sent] == [0, 1, 2, 3]
