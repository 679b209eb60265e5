"""The learning rate of each step, of runs that go on with another number of steps too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.records.run.optimizer import FINAL_RATE, Optimizer, StepsChange, learning_rate

DECAYS = st.sampled_from(["constant", "cosine", "linear"])


def rates(settings: Optimizer, steps: int) -> list[float]:
    return [learning_rate(settings, step, steps) for step in range(steps + 1)]


def test_it_rises_in_a_tenth_of_the_steps_and_falls_to_a_tenth_of_the_peak() -> None:
    settings = Optimizer(lr=2.0, decay="cosine")
    shown = rates(settings, 100)
    assert shown[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert shown[10] == 2.0
    assert shown[55] == pytest.approx(1.1)
    assert shown[100] == pytest.approx(0.2)
    assert rates(Optimizer(lr=2.0, decay="linear"), 100)[55] == pytest.approx(1.1)
    assert set(rates(Optimizer(lr=2.0), 100)[10:]) == {2.0}
    assert rates(Optimizer(lr=2.0, warmup_steps=0), 10) == [2.0] * 11


@pytest.mark.parametrize("decay", ["constant", "cosine", "linear"])
def test_a_run_that_is_made_longer_does_not_warm_up_again(decay: str) -> None:
    """100 steps warm up for 10, 20,000 for 1,000: step 101 would be back at a tenth of the peak."""
    before = Optimizer(lr=1.0, decay=decay)
    after = before.with_steps_changed(at=60, before=100)
    assert after.warmup(20_000) == before.warmup(100) == 10
    assert rates(after, 20_000)[:61] == rates(before, 100)[:61]
    later = rates(after, 20_000)[60:]
    assert later == sorted(later, reverse=True)
    assert later[-1] == pytest.approx(1.0 if decay == "constant" else FINAL_RATE)


def test_a_run_that_is_done_goes_on_at_the_rate_that_it_ended_with() -> None:
    after = Optimizer(lr=1.0, decay="cosine").with_steps_changed(at=100, before=100)
    assert rates(after, 300)[100:] == pytest.approx([FINAL_RATE] * 201)


def test_within_its_warm_up_a_run_goes_on_warming_up() -> None:
    before = Optimizer(lr=1.0, decay="linear", warmup_steps=20)
    after = before.with_steps_changed(at=5, before=1000)
    assert rates(after, 100)[:20] == rates(before, 1000)[:20]
    assert rates(after, 100)[20] == 1.0


def test_changes_that_a_checkpoint_undid_are_forgotten() -> None:
    changed = Optimizer().with_steps_changed(40, 100).with_steps_changed(80, 200)
    assert changed.steps_changed == [StepsChange(at=40, before=100), StepsChange(at=80, before=200)]
    assert changed.with_steps_changed(80, 300).steps_changed[1:] == [StepsChange(at=80, before=200)]
    assert changed.with_steps_changed(60, 300).steps_changed[1:] == [StepsChange(at=60, before=200)]
    assert changed.with_steps_changed(20, 300).steps_changed == [StepsChange(at=20, before=100)]
    assert changed.with_steps_changed(0, 300).steps_changed == []


@given(
    decay=DECAYS, warmup=st.integers(0, 60), first=st.integers(1, 300),
    changes=st.lists(st.tuples(st.integers(0, 120), st.integers(1, 300)), max_size=4),
)  # fmt: skip
def test_it_never_jumps_and_never_rises_again(
    decay: str, warmup: int, first: int, changes: list[tuple[int, int]]
) -> None:
    """However often a run goes on with another number of steps, each time after some more of them."""
    settings, steps, at = Optimizer(lr=1.0, decay=decay, warmup_steps=warmup), first, 0
    done: list[float] = []
    for more, longer in changes:
        at = min(at + more, steps)
        before = learning_rate(settings, at, steps)
        done = rates(settings, steps)[:at]
        settings, steps = settings.with_steps_changed(at, steps), at + longer
        if at:
            assert learning_rate(settings, at, steps) == pytest.approx(before)
        assert rates(settings, steps)[: len(done)] == pytest.approx(done)
    shown = rates(settings, steps)
    end = min(settings.warmup(steps), steps)
    assert shown[:end] == sorted(shown[:end])
    assert all(later <= now + 1e-12 for now, later in zip(shown[end:], shown[end + 1 :], strict=False))
    assert all(0 < rate <= 1 for rate in shown)
