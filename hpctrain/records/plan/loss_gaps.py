"""How much codecs raise the loss, as trainings measured it: what mode auto compares with a `loss_budget`.

To make a measurement known to mode auto, add a row to `LOSS_GAPS`; the table of the page `hpctrain docs
results/compression` repeats it, and a test compares the two.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class LossGap(NamedTuple):
    """The gap of the validation loss with a codec to that with exact sums after 2,000 steps, as a share of the
    latter."""

    settings: dict[str, Any]
    """Mode of the codec and its settings that are not defaults, as in run.yaml. Settings on which the
    loss is not taken to depend are left out, such as the length of the warm-up and the seed of random signs."""
    share: float
    """Mean over the trainings, as 0.01 for 1 %."""
    interval: float | None
    """Half the width of the 95 % interval of the mean; None if there was one training."""
    parameters: float
    """Parameters of the model that was trained."""
    seeds: int
    """Number of seeds; each has, on each text, a training with the codec and one with exact sums."""
    options: str
    """Options of `hpctrain bench compression --convergence` with which the trainings were made."""

    @property
    def figure(self) -> str:
        """Return the gap and its interval, as '+0.35 % ± 0.99'."""
        mean = f"{100 * self.share:+.3g} %"
        return mean if self.interval is None else f"{mean} ± {100 * self.interval:.2g}"

    @property
    def scene(self) -> str:
        """Return what was trained, as '0.68 M parameters, 3 seeds'."""
        return f"{self.parameters / 1e6:.3g} M parameters, {self.seeds} seed{'s' if self.seeds > 1 else ''}"


_THREE_SEEDS = "--seeds 1-3 --method bf16 --method int8 --method int4 --method power_sgd_r4"
_ALL_METHODS = "--seeds 1"
_ROTATED = (
    "--preset 0.13m --method rotated_int3 --method rotated_int2 --lr 4e-3,8e-3,1.6e-2 --seeds 1-3 --text documents "
    "--text code"
)
_ROTATED_INT4 = "--preset 0.13m --method rotated_int4 --lr 4e-3,8e-3,1.6e-2 --seeds 1-3 --text documents --text code"
_LOW_RANK = "--preset 0.13m --method power_sgd_auto_int2 --lr 4e-3,8e-3,1.6e-2 --seeds 1-3 --text documents --text code"

LOSS_GAPS: tuple[LossGap, ...] = (
    LossGap({"mode": "bf16"}, -0.0015, 0.0012, 0.68e6, 3, _THREE_SEEDS),
    LossGap({"mode": "int8"}, 0.0004, 0.0007, 0.68e6, 3, _THREE_SEEDS),
    LossGap({"mode": "int4"}, 0.0035, 0.0099, 0.68e6, 3, _THREE_SEEDS),
    LossGap({"mode": "rotated_int3"}, -0.0105, 0.0127, 0.13e6, 3, _ROTATED),
    LossGap({"mode": "rotated_int2"}, 0.0039, 0.0156, 0.13e6, 3, _ROTATED),
    LossGap({"mode": "rotated_int4"}, 0.0141, 0.0111, 0.13e6, 3, _ROTATED_INT4),
    LossGap({"mode": "power_sgd", "rank": "auto", "remainder": "int2"}, 0.0085, 0.0040, 0.13e6, 3, _LOW_RANK),
    LossGap({"mode": "power_sgd"}, 0.0815, 0.017, 0.68e6, 3, _THREE_SEEDS),
    LossGap({"mode": "topk", "density": 0.07}, 0.108, None, 0.68e6, 1, _ALL_METHODS),
    LossGap({"mode": "adaptive"}, 0.093, None, 0.68e6, 1, _ALL_METHODS),
)
"""The measured gaps, one row for each settings of a codec. A codec without a row is never chosen by a `loss_budget`."""
