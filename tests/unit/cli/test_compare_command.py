"""`compare`: losses of runs at equal progress, and groups of seeds with their intervals."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import RUN, event, submitted_run

from hpctrain.records.history.run_log import BytesSent, MetricRow

Trained = Callable[..., Path]


@pytest.fixture
def trained(fake, runs) -> Trained:
    """Make a run folder whose run was trained for some steps with a loss by the step's number."""

    def make(name: str, loss: Callable[[int], float], steps: int = 100, tokens: int = 64, **settings: Any) -> Path:
        folder = submitted_run(runs, None, event("finished", step=steps), name=f"{name}-20260101T000000Z-00ff")
        (folder / "run.yaml").write_text(json.dumps({**RUN, "name": name, "steps": steps, **settings}))
        rows = [
            MetricRow(
                step=step, generation=0, time_s=1_795_000_000.0 + step, step_time_s=1.0, loss=loss(step), lr=1e-3,
                tokens=tokens, samples=step, tokens_per_s=float(tokens), bytes_sent=BytesSent(), stage_time_s=[1.0],
                micro_batches=[1], valid_loss=loss(step) + 1 if step == steps else None,
            )
            for step in range(1, steps + 1)
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))
        attempt = {"attempt": 0, "nodes": ["a", "b"], "start": 0.0, "end": 1800.0}
        (folder / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
        return folder

    return make


@pytest.fixture
def compared(hpctrain) -> Callable[..., dict[str, Any]]:
    def run(*words: str) -> dict[str, Any]:
        result = hpctrain("compare", *words, "--json")
        assert result.exit_code == 0, result.exception
        return json.loads(result.stdout)

    return run


def test_losses_at_equal_steps_are_means_of_the_steps_before(trained, compared):
    trained("long", lambda step: 10 - step / 100, steps=1000)
    trained("short", lambda step: 9.0, steps=300)
    answer = compared("long", "short", "--sort", "name")
    assert (answer["unit"], answer["points"]) == ("steps", [200, 300, 400, 600, 800, 1000])
    long, short = answer["runs"]
    # The mean over the 20 steps up to a point.
    assert long["losses"] == pytest.approx([10 - (point - 9.5) / 100 for point in answer["points"]])
    assert short["losses"] == [9.0, 9.0, None, None, None, None]
    assert (long["tokens"], long["hours"], long["node_hours"]) == (64_000, 0.5, 1.0)
    assert answer["groups"] == []


def test_runs_with_other_batches_are_compared_at_equal_tokens(trained, compared, hpctrain):
    """The loss follows the tokens, so at equal tokens both runs are equal, and at equal steps they are not."""
    trained("small", lambda step: 8 - step / 1000, steps=1000, tokens=64, batch={"global": 8})
    trained("large", lambda step: 8 - 4 * step / 1000, steps=250, tokens=256, batch={"global": 32})
    answer = compared("small", "large")
    assert answer["unit"] == "tokens"
    assert answer["points"] == [12_800, 25_600, 38_400, 51_200, 64_000]
    small, large = (row["losses"] for row in answer["runs"])
    assert small == pytest.approx(large, abs=0.003)
    assert "training loss at equal tokens" in hpctrain("compare", "small", "large").stdout


def test_seeds_are_groups_with_a_t_interval(trained, compared, hpctrain):
    losses = [3.0, 3.3, 3.9]
    for seed, loss in enumerate(losses):
        trained(f"a{seed}", lambda step, loss=loss: loss, seed=seed)
    trained("other", lambda step: 2.0, seed=7, optimizer={"lr": 0.5})
    answer = compared("a0", "a1", "a2", "other", "--sort", "name")
    (group,) = answer["groups"]
    assert [name.partition("-")[0] for name in group["runs"]] == ["a0", "a1", "a2"]
    assert (group["seeds"], group["settings"]["optimizer.lr"]) == ([0, 1, 2], 1e-4)
    # Student's t for 2 degrees of freedom and 95 %, from a printed table.
    half_width = 4.3027 * statistics.stdev(losses) / 3**0.5
    for mean, shift in ((group["losses"][-1], 0), (group["valid_loss"], 1)):
        assert mean["mean"] == pytest.approx(statistics.fmean(losses) + shift)
        assert mean["half_width"] == pytest.approx(half_width, rel=1e-4)
        assert mean["runs"] == 3
    assert (group["hours"], group["gpu_hours"]) == ({"mean": 0.5, "half_width": 0.0, "runs": 3}, None)
    text = hpctrain("compare", "a0", "a1", "a2", "other").stdout
    assert "groups of seeds, mean ± 95 % t interval" in text
    assert f"3.4000 ± {half_width:.4f}" in text
    assert "3 seeds (0, 1, 2) as a0" in text


def test_a_seed_without_a_loss_is_left_out_of_means(trained, compared):
    for seed in range(3):
        folder = trained(f"a{seed}", lambda step, seed=seed: 3.0 + seed, seed=seed)
    (folder / "metrics.jsonl").unlink()
    (group,) = compared("a0", "a1", "a2")["groups"]
    assert (group["valid_loss"]["mean"], group["valid_loss"]["runs"]) == (4.5, 2)
    assert [value["mean"] for value in group["losses"]] == [3.5] * 5


@pytest.mark.parametrize("change", [{"optimizer": {"lr": 0.1}}, {"cluster": {"kind": "slurm", "nodes": "3"}}])
def test_runs_that_differ_in_more_than_the_seed_are_no_group(trained, compared, change):
    trained("a", lambda step: 3.0, seed=0)
    trained("b", lambda step: 3.0, seed=1, **change)
    assert compared("a", "b")["groups"] == []


def test_of_runs_with_the_same_seed_the_first_counts(trained, compared):
    for name, seed, loss in (("a", 0, 3.0), ("b", 0, 9.0), ("c", 1, 4.0)):
        trained(name, lambda step, loss=loss: loss, seed=seed)
    assert compared("a", "b")["groups"] == []
    (group,) = compared("a", "b", "c")["groups"]
    assert (group["seeds"], group["losses"][-1]["mean"]) == ([0, 1], 3.5)


def test_runs_without_steps_have_no_table_of_losses(fake, runs, hpctrain, compared):
    submitted_run(runs, None, name="a-20260101T000000Z-00ff")
    answer = compared("a")
    assert (answer["points"], answer["runs"][0]["losses"], answer["runs"][0]["tokens"]) == ([], [], None)
    assert "training loss" not in hpctrain("compare", "a").stdout
