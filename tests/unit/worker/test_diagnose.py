"""The line that tells where a loss or a gradient stopped being a number."""

from __future__ import annotations

import math

import pytest

from hpctrain.records.run.run import Run
from hpctrain.worker.diagnose import NonFinite, diagnosis_line

PLACES = ["n0:cuda0", "n0:cuda1"]
FOUND = NonFinite((1, 9, 1), 1, "layers.7.feed_forward.w2", "forward output", 3, 4096, 0, 2048, 0.5)


def run(**changes: object) -> Run:
    base = {"steps": 20, "model": {"preset": "tiny-1m"}, "data": {"train": ["data"]}, "batch": {"global": 8}}
    return Run.model_validate({**base, **changes})


def test_the_line_names_step_rank_layer_and_what_to_do() -> None:
    assert diagnosis_line(12, math.nan, math.nan, FOUND, PLACES, run()) == (
        "step 12, rank 1 (n0:cuda1): loss is nan; first in layer 7 (layers.7.feed_forward.w2): "
        "forward output has 3 of 4096 values not finite; weights finite, the largest 0.5. "
        "Lower optimizer.lr (0.0001 now)"
    )


def test_a_finite_loss_leaves_the_gradient() -> None:
    gradient = NonFinite((0, 2, 0), 0, "embedding", "gradient of weight", 1, 64, 0, 64, 0.5)
    said = diagnosis_line(3, 2.5, math.inf, gradient, PLACES, run())
    assert said.startswith(
        "step 3, rank 0 (n0:cuda0): the gradient's norm is inf; first in embedding: gradient of weight"
    )


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"precision": "bf16"}, "Lower optimizer.lr (0.0001 now), or set precision to fp32 (bf16 now)"),
        ({"optimizer": {"lr": 1.0, "clip_norm": None}}, "Lower optimizer.lr (1 now), set optimizer.clip_norm"),
    ],
)
def test_the_advice_fits_the_run(changes: dict[str, object], advice: str) -> None:
    assert diagnosis_line(1, math.nan, math.nan, FOUND, PLACES, run(**changes)).endswith(advice)


def test_ruined_weights_are_blamed_on_an_earlier_step() -> None:
    ruined = NonFinite((0, 1, 1), 0, "layers.0.attention.wq", "forward output", 9, 9, 2, 16, 0.1)
    said = diagnosis_line(5, math.inf, math.nan, ruined, PLACES, run())
    assert "loss is inf; first in layer 0" in said
    assert "2 of 16 weights not finite. An earlier step ruined the weights" in said


def test_what_does_not_happen_again_is_said_to_be_so() -> None:
    said = diagnosis_line(5, 2.0, math.nan, None, PLACES, run())
    assert said.startswith("step 5: the gradient's norm is nan, and it cannot be found again")
