"""Figures of the gradients of layers, from a sample, beside the same figures of whole gradients."""

from __future__ import annotations

import math

import pytest
import torch

from hpctrain.records.history.layer_figures import KEPT_DENSITY, LayerFigures, layers_of_ranks
from hpctrain.worker.figures.layer_figures import DECAY, LEAST_WINDOW, WINDOW, SampledGradients

SIZES = [300, 40]
PARTS = [[100, 200], [40]]
"""Sampled numbers of each parameter of each layer; only the first parameter is one of attention."""


def gradients(count: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    scale = torch.cat([torch.full((SIZES[0],), 0.5), torch.full((SIZES[1],), 2.0)])
    return [1.0 + scale * torch.randn(sum(SIZES)) for _ in range(count)]


def test_the_variance_is_that_over_the_steps() -> None:
    steps = gradients(int(1 / DECAY))  # so far each has the same weight
    history = SampledGradients(PARTS, [True, False, False])
    figures = [history.add(step) for step in steps]
    assert "gradient_variance" not in figures[0][0]
    whole = torch.stack(steps).var(0, correction=0)
    for (start, size), layer in zip([(0, 300), (300, 40)], figures[-1], strict=True):
        assert layer["gradient_variance"] == pytest.approx(float(whole[start : start + size].mean()), rel=1e-5)
    first, second = figures[-1]
    assert first["attention_share"] == pytest.approx(float(whole[:100].sum() / whole[:300].sum()), rel=1e-5)
    assert second["attention_share"] == 0


def test_the_density_is_the_share_of_numbers_with_most_of_the_norm() -> None:
    sample = torch.zeros(sum(SIZES))
    sample[:30] = 1.0  # 27 of them have 90 %
    sample[300] = -5.0
    few, one = SampledGradients(PARTS, [True, False, False]).add(sample)
    assert few["gradient_density"] == pytest.approx(27 / 300)
    assert one["gradient_density"] == pytest.approx(1 / 40)
    assert "gradient_density" not in SampledGradients(PARTS, [True, False, False]).add(torch.zeros(sum(SIZES)))[0]


def test_the_energy_kept_is_that_of_feedback_over_a_window() -> None:
    steps, history = gradients(WINDOW + 1), SampledGradients(PARTS, [True, False, False])
    figures = [history.add(step) for step in steps]
    assert "energy_kept" not in figures[LEAST_WINDOW - 2][0]
    assert "energy_kept" not in figures[WINDOW][0]  # a new window
    residual, sent = torch.zeros(SIZES[0]), torch.zeros(SIZES[0])
    for number, step in enumerate(steps[:WINDOW], 1):
        residual += step[: SIZES[0]]
        largest = residual.abs().topk(math.ceil(KEPT_DENSITY * SIZES[0])).indices
        sent[largest] += residual[largest]
        residual[largest] = 0
        if number >= LEAST_WINDOW:
            whole = torch.stack(steps[:number]).sum(0)[: SIZES[0]]
            lost = float((whole - sent).square().sum() / whole.square().sum())
            assert figures[number - 1][0]["energy_kept"] == pytest.approx(1 - lost, abs=1e-4)


def test_layers_of_several_ranks_are_weighted_by_what_each_holds() -> None:
    first = [LayerFigures(layer="0", numbers=30, gradient_variance=1.0, forward_s=0.2)]
    second = [
        LayerFigures(layer="0", numbers=10, gradient_variance=5.0, forward_s=0.3),
        LayerFigures(layer="head", numbers=7),
    ]
    assert layers_of_ranks([first, second]) == [
        LayerFigures(layer="0", numbers=30, gradient_variance=2.0, forward_s=0.3),
        LayerFigures(layer="head", numbers=7),
    ]
