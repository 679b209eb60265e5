"""What a model draws is a function of where in the training it draws it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.parallel.gradients import clip_gradients, gradient_norm
from hpctrain.parallel.stage import RandomStream, stream_seed
from hpctrain.records.plan.plan import Plan, Replica, Stage

PLACES = st.tuples(*[st.integers(0, 2**31)] * 5)


@given(PLACES, PLACES)
def test_each_place_has_a_seed_of_its_own(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    assert (stream_seed(*one) == stream_seed(*other)) == (one == other)
    assert 0 <= stream_seed(*one) < 2**63


def drawn(stream: RandomStream, step: int, stage: int, micro_batch: int) -> list[float]:
    stream.step = step
    stream.begin(stage, micro_batch)
    return torch.rand(3).tolist()


def test_the_order_of_micro_batches_does_not_matter() -> None:
    stream = RandomStream(seed=3, replica=1, device=torch.device("cpu"))
    forwards = [drawn(stream, 5, 0, micro_batch) for micro_batch in (0, 1, 2)]
    assert [drawn(stream, 5, 0, micro_batch) for micro_batch in (2, 1, 0)] == forwards[::-1]
    assert len({tuple(values) for values in forwards}) == 3


def test_steps_stages_and_replicas_draw_differently() -> None:
    one, other = (RandomStream(seed=3, replica=replica, device=torch.device("cpu")) for replica in (0, 1))
    found = [drawn(one, 5, 0, 0), drawn(one, 6, 0, 0), drawn(one, 5, 1, 0), drawn(other, 5, 0, 0)]
    assert len({tuple(values) for values in found}) == 4


def test_the_norm_of_large_matrices_is_exact() -> None:
    """fp32 sums over a whole matrix of this size are 1e-4 off."""
    plan = Plan(
        pp=1, dp=1, tp=1, stages=[Stage(layers=(0, 1))], ranks=["a:cpu0"],
        replicas=[Replica(sequences=1, micro_batch=1, micro_batches=1, devices=[["a:cpu0"]])],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(3000, 1024)), torch.nn.Parameter(torch.zeros(1000))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    expected = float(sum(p.grad.double().pow(2).sum() for p in parameters).sqrt())
    assert abs(gradient_norm(parameters, plan) / expected - 1) < 1e-8


@pytest.mark.parametrize(("norm", "factor"), [(2.0, 0.5), (0.5, 1.0), (math.nan, 1.0)])
def test_gradients_are_scaled_to_the_largest_norm_and_left_alone_by_one_that_is_no_number(
    norm: float, factor: float
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    clip_gradients([parameter], torch.tensor(norm, dtype=torch.float64), 1.0)
    assert torch.allclose(parameter.grad, torch.full((4,), factor))
