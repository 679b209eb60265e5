"""`hpctrain bench adapt`: what it says of rows whose truth is known."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from hpctrain.base.errors import InputError
from hpctrain.bench.adapt.adapting_job import reached_s, usual_step_s
from hpctrain.bench.adapt.lab_adapt import LOSS_STEPS, target_s
from hpctrain.cli.main import cli
from hpctrain.records.history.run_log import BytesSent, MetricRow


def rows(ends: list[float], generation: int = 0, first: int = 1, loss: float = 3.0) -> list[MetricRow]:
    return [
        MetricRow(
            step=first + index, generation=generation, time_s=end, step_time_s=0.1, loss=loss, lr=1e-3, tokens=64,
            samples=1, tokens_per_s=640.0, bytes_sent=BytesSent(), stage_time_s=[0.1], micro_batches=[1],
        )
        for index, end in enumerate(ends)
    ]  # fmt: skip


def every(seconds: float, start: float, count: int) -> list[float]:
    return [start + seconds * index for index in range(1, count + 1)]


def test_a_change_of_the_plan_counts_in_the_time_until_the_goal() -> None:
    slow, fast = rows(every(0.2, 100.0, 50)), rows(every(0.1, 112.0, 30), 1, 51)
    # The first window of ten fast steps ends 1.1 s after the first one's end at 112.1 s.
    assert reached_s(slow + fast, 100.0, 0.11) == pytest.approx(13.1)
    assert reached_s(slow, 100.0, 0.11) is None
    # Steps before the change were fast, too.
    assert reached_s(rows(every(0.1, 90.0, 100)) + slow, 100.0, 0.11) is None


def test_the_gap_between_generations_is_no_step() -> None:
    assert usual_step_s(rows([1.0, 2.0]) + rows([60.0, 61.0, 62.0], 1, 3)) == 1.0


def test_the_target_is_reached_by_a_mean_loss() -> None:
    before, after = rows(every(1.0, 0.0, 30)), rows(every(1.0, 30.0, LOSS_STEPS), 0, 31, loss=2.0)
    assert target_s(before + after, 2.5) == pytest.approx(30.0 + LOSS_STEPS / 2 - 1.0)
    assert target_s(before, 2.5) is None
    assert target_s([], 2.5) is None


def test_the_bench_needs_a_lab() -> None:
    with pytest.raises(InputError, match="give --lab"):
        CliRunner().invoke(cli, ["bench", "adapt"], catch_exceptions=False)
