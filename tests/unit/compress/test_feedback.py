"""Each recursion does what its line says, in either precision, and its residuals can be saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.collectives.sparse_state import ErrorFeedback
from hpctrain.records.plan.compression import Feedback

BETA = 0.9


def expected(mode: Feedback, gradient: Tensor, residual: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """What is sent and what is kept, written down directly."""
    a = {"standard": gradient + residual, "decayed": gradient + BETA * residual, "paper": gradient + residual}[mode]
    sent = torch.zeros_like(a)
    sent[places] = a[places]
    return sent, gradient - sent + BETA * residual if mode == "paper" else a - sent


@pytest.mark.parametrize("mode", ["standard", "decayed", "paper"])
def test_the_recursions(mode: Feedback) -> None:
    generator = torch.Generator().manual_seed(1)
    feedback = ErrorFeedback(mode, beta=BETA)
    residual = torch.zeros(50)
    for _ in range(6):
        gradient = torch.randn(50, generator=generator)
        before = gradient.clone()
        places = torch.randperm(50, generator=generator)[:10].sort().values
        sent, residual = expected(mode, gradient, residual, places)
        a = feedback.add("3", gradient)
        values = a[places]
        feedback.store_residual("3", a, places, values)
        assert torch.equal(gradient, before)
        torch.testing.assert_close(values, sent[places])
        torch.testing.assert_close(feedback.state()["residual.3"], residual)


def test_what_rounding_took_is_kept_to_the_bit() -> None:
    feedback = ErrorFeedback()
    gradient = torch.tensor([1.001, 0.5, -3.0])
    a = feedback.add("0", gradient)
    sent = a[:1].bfloat16().float()
    feedback.store_residual("0", a, torch.tensor([0]), sent)
    assert torch.equal(feedback.state()["residual.0"], torch.cat([gradient[:1] - sent, gradient[1:]]))
    assert float(feedback.state()["residual.0"][0]) != 0


def test_a_residual_in_bf16_takes_half_the_memory() -> None:
    feedback = ErrorFeedback(dtype=torch.bfloat16)
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(0))
    feedback.store_residual("0", feedback.add("0", gradient), torch.arange(10), gradient[:10])
    kept = feedback.state()["residual.0"]
    assert kept.dtype == torch.bfloat16
    assert bool((kept[:10] == 0).all())
    assert torch.equal(kept[10:], gradient[10:].bfloat16())


def test_none_keeps_nothing() -> None:
    feedback = ErrorFeedback("none", reset="flush", reset_every=1)
    gradient = torch.ones(4)
    feedback.store_residual("0", feedback.add("0", gradient), torch.tensor([1]), torch.ones(1))
    feedback.add_residual("0", 0, torch.ones(2))
    assert feedback.state() == {}
    assert feedback.norm() == 0
    assert not feedback.is_flush_step(1)


def test_resets_come_when_they_are_due() -> None:
    flush, zero = ErrorFeedback(reset="flush", reset_every=3), ErrorFeedback(reset="zero", reset_every=3)
    assert [flush.is_flush_step(step) for step in range(1, 7)] == [False, False, True] * 2
    for step in range(1, 4):
        assert zero.norm() == pytest.approx(2.0 * (step - 1))
        zero.store_residual("0", zero.add("0", torch.ones(4)), torch.empty(0, dtype=torch.int64), torch.empty(0))
        zero.end_step(step)
        assert not zero.is_flush_step(step)
    assert zero.state() == {}


def test_everything_is_sent_once() -> None:
    feedback = ErrorFeedback()
    feedback.load_state({"residual.0": torch.ones(4), "q.0": torch.ones(2)})
    assert torch.equal(feedback.take_all("0", torch.full((4,), 2.0)), torch.full((4,), 3.0))
    assert feedback.norm() == 0


def test_a_saved_residual_goes_on_and_one_of_another_size_is_refused() -> None:
    feedback, saved = ErrorFeedback(), {"residual.7": torch.full((2, 2), 0.5)}
    feedback.load_state(saved)
    assert torch.equal(feedback.add("7", torch.ones(4)), torch.full((4,), 1.5))
    assert torch.equal(saved["residual.7"], torch.full((2, 2), 0.5))
    feedback.load_state(saved)
    with pytest.raises(CheckpointError, match=r"residual\.7: found 4 numbers for a gradient of 5; allowed"):
        feedback.add("7", torch.ones(5))
