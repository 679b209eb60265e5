"""The loss scale of fp16: halved by an overflow, doubled after many good steps, never beyond its limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.parallel.loss import LossScaler
from hpctrain.records.history.manifest import GROWTH_INTERVAL, LARGEST_SCALE, LossScale, Manifest

norms = st.one_of(st.just(math.inf), st.just(math.nan), st.floats(0, 1e6))


def test_an_overflow_halves_it_and_starts_the_count_anew() -> None:
    scaler = LossScaler(LossScale(value=1024, good_steps=5, skipped=1))
    assert scaler.skips(math.inf)
    assert scaler.state == LossScale(value=512, good_steps=0, skipped=2)


def test_many_good_steps_double_it() -> None:
    scaler = LossScaler(LossScale(value=1024, good_steps=GROWTH_INTERVAL - 2))
    assert not scaler.skips(1.0)
    assert scaler.state == LossScale(value=1024, good_steps=GROWTH_INTERVAL - 1)
    assert not scaler.skips(1.0)
    assert scaler.state == LossScale(value=2048, good_steps=0)


def test_at_its_smallest_no_step_is_skipped() -> None:
    """What overflows without any scale is the training's fault: the caller stops the run."""
    scaler = LossScaler(LossScale(value=1))
    assert not scaler.skips(math.nan)
    assert scaler.state == LossScale(value=1)


@given(st.integers(0, 24), st.lists(norms, max_size=60))
def test_it_stays_a_power_of_two_within_its_limits(exponent: int, found: list[float]) -> None:
    scaler = LossScaler(LossScale(value=2.0**exponent, good_steps=GROWTH_INTERVAL - 1))
    skipped = sum(scaler.skips(norm) for norm in found)
    assert 1 <= scaler.state.value <= LARGEST_SCALE
    assert math.log2(scaler.state.value).is_integer()
    assert scaler.state.skipped == skipped <= sum(not math.isfinite(norm) for norm in found)


def test_scaled_loss_and_unscaled_gradient_are_exact() -> None:
    scaler = LossScaler(LossScale(value=2.0**16))
    weight = torch.tensor([0.3, -1.7], requires_grad=True)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).sum()

    loss(weight, torch.ones(2)).backward()
    expected = weight.grad
    weight.grad = None
    scaler.scaled(loss)(weight, torch.ones(2)).backward()
    assert weight.grad is not None
    scaler.unscale([weight.grad])
    assert torch.equal(weight.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [None, LossScale(value=256.0, good_steps=7, skipped=3)])
def test_the_manifest_keeps_it(scale: LossScale | None) -> None:
    manifest = Manifest(
        step=9, generation=0, samples=72, seed=0, run_sha256="", model_sha256="", world_size=1,
        loss_scale=scale, files=[],
    )  # fmt: skip
    assert Manifest.from_json(manifest.to_json(), "manifest.json").loss_scale == scale
