"""What was measured of a run's gradients is part of the choice of a codec."""

from __future__ import annotations

import pytest

from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.search.measured_gradients import priced_codec
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.plan.compression import Adaptive, NoCompression

pytestmark = pytest.mark.usefixtures("short_annealing")


def layers(kept: float, *variances: float) -> tuple[LayerFigures, ...]:
    return tuple(
        LayerFigures(layer=str(number), numbers=1000, gradient_variance=variance, energy_kept=kept)
        for number, variance in enumerate(variances)
    )


@pytest.mark.slow
def test_measured_gradients_allow_mode_adaptive_and_may_exclude_topk(run, topology) -> None:
    asked = run(
        compression={"mode": "auto", "lossy": True}, parallel={"mode": "fixed", "dp": 2}, steps=1000,
        dims={"layers": 4, "dim": 256, "heads": 4},
    )  # fmt: skip

    def verdicts(figures: tuple[LayerFigures, ...]) -> dict[str, str]:
        request = PlanRequest(neighbours=False, layers=figures)
        made = make_plan(asked, asked.spec(), topology(default=(2e-4, 8e-8)), request)
        return {each.codec.mode: each.verdict for each in made.compression[0].compared}

    assert "adaptive" not in verdicts(())
    little, much = verdicts(layers(0.1, 1.0, 2.0)), verdicts(layers(0.9, 1.0, 2.0))
    assert little["topk"] == "10% of the gradients' energy would arrive, as measured, and 30% are needed"
    assert "energy" not in much["topk"]
    assert "adaptive" in little


def test_variances_say_how_much_mode_adaptive_sends() -> None:
    """Equation (3): of three equal layers the one that varies least sends 5 %, the one that varies most 30 %."""
    codec = Adaptive(mode="adaptive")
    assert priced_codec(codec, layers(0.5, 1.0, 2.0, 3.0)).density == pytest.approx((0.05 + 0.175 + 0.3) / 3)
    assert priced_codec(codec, ()) == codec
    assert priced_codec(NoCompression(), layers(0.5, 1.0, 2.0)) == NoCompression()
