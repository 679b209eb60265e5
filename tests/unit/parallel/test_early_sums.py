"""Whether sums begin early is what a run's own steps say."""

from __future__ import annotations

import pytest

from hpctrain.parallel.early_sums import BLOCK_STEPS, TRIAL_BLOCKS, WARM_STEPS, EarlyOrLate


def decided(early_s: float, late_s: float, odd_s: float = 0.0) -> list[bool]:
    """How the sums of each step began, where steps take this long; every seventh step takes longer."""
    choice, now_s, ways = EarlyOrLate(), 0.0, []
    for step in range(WARM_STEPS + TRIAL_BLOCKS * BLOCK_STEPS + 20):
        ways.append(choice.early)
        now_s += (early_s if choice.early else late_s) + odd_s * (step % 7 == 0)
        choice.step_ended(now_s)
    return ways


@pytest.mark.parametrize("odd_s", [0.0, 5.0])
@pytest.mark.parametrize(("early_s", "late_s", "expected"), [(1.0, 1.1, True), (1.0, 1.0, True), (1.04, 1.0, False)])
def test_the_faster_way_is_taken_after_a_trial_of_both(
    early_s: float, late_s: float, expected: bool, odd_s: float
) -> None:
    ways = decided(early_s, late_s, odd_s)
    assert all(ways[: WARM_STEPS + BLOCK_STEPS]), "the first steps, and the first block"
    trial = ways[WARM_STEPS:-20]
    assert sum(trial) == len(trial) // 2
    assert set(ways[-20:]) == {expected}
