"""How long a run will take: hours, jobs and what a time limit means, told before it is queued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.jobs.wall_time import (
    BilledResources,
    TimeLimit,
    WallTime,
    duration_text,
    measured_start_up_s,
    time_limit_text,
)
from hpctrain.launch.slurm_job.queue import start_words
from hpctrain.slurm.commands import StartEstimate

HOUR = 3600
RUN = WallTime(step_s=1.2, steps=10_000, start_up_s=300.0)
"""Three hours and twenty minutes of steps."""


def test_gpu_hours_are_those_of_all_gpus_of_the_job() -> None:
    words = duration_text(RUN, BilledResources(nodes=2, gpus=8))
    assert words.startswith(
        "about 3 h 25 min for 10,000 steps: 27.3 GPU-hours (start-up 5 min 0 s as in an earlier run"
    )
    assert "6.83 node-hours" in duration_text(RUN, BilledResources(2, 0))
    assert "start-up not counted" in duration_text(WallTime(1.2, 10_000, None), BilledResources(2, 0))


def test_every_figure_has_its_range() -> None:
    run = WallTime(step_s=36.0, steps=1000, start_up_s=None, range_s=(18.0, 144.0))
    words = duration_text(run, BilledResources(nodes=4, gpus=32, units_per_h=500.0))
    assert words.startswith(
        "about 10 h 0 min (5 h 0 min to 40 h 0 min) for 1,000 steps: 320 (160 to 1,280) GPU-hours, "
        "5,000 (2,500 to 20,000) billing units (start-up not counted"
    )
    assert run.suggested_s(notice_s=120) == pytest.approx(40 * HOUR, abs=600)
    limit = TimeLimit(11 * HOUR, True)
    assert "11:00:00 means about 1 job (1 to 4), one after the other; 1-16:05:00" in time_limit_text(run, limit, 120)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (
            TimeLimit(HOUR, True),
            "cluster.time 01:00:00 means about 4 jobs, one after the other; 04:20:00 should do",
        ),
        (TimeLimit(480, True), "cluster.time 00:08:00 is over before the run trains; 04:20:00 should do"),
        (TimeLimit(5 * HOUR, True), "cluster.time 05:00:00 should be enough for one job"),
        (TimeLimit(48 * HOUR, False), "the partition's limit 2-00:00:00 is more than it needs; 04:20:00 should do"),
        (TimeLimit(None, False), "the job has no time limit; cluster.time 04:20:00 should do"),
    ],
)
def test_what_a_limit_means(limit: TimeLimit, words: str) -> None:
    assert time_limit_text(RUN, limit, notice_s=120).startswith(words)


def test_every_job_pays_for_its_start_and_its_notice() -> None:
    run = WallTime(step_s=1.0, steps=1000, start_up_s=100.0)
    assert run.jobs(limit_s=100 + 60 + 40 + 500, notice_s=40) == 2
    assert run.jobs(limit_s=100 + 60 + 40 + 499, notice_s=40) == 3
    assert run.jobs(limit_s=200, notice_s=40) is None


def test_the_start_up_is_that_of_the_first_attempt(tmp_path: Path) -> None:
    assert measured_start_up_s(tmp_path) is None
    row = {"step": 1, "generation": 0, "time_s": 1050.0, "step_time_s": 2.0, "loss": 1.0, "lr": 0.1, "tokens": 1}
    row |= {"samples": 1, "tokens_per_s": 1.0, "bytes_sent": {}, "stage_time_s": [1.0], "micro_batches": [1]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "step": 2}) + "\n")
    assert measured_start_up_s(tmp_path) is None
    for damaged in ({"attempt": 0}, {"attempt": 0, "start": "noon"}):
        (tmp_path / "attempts.jsonl").write_text(json.dumps(damaged) + "\n")
        assert measured_start_up_s(tmp_path) is None
    (tmp_path / "attempts.jsonl").write_text(json.dumps({"attempt": 0, "start": 1000.0}) + "\n")
    assert measured_start_up_s(tmp_path) == 48.0
    (tmp_path / "metrics.jsonl").write_text("{half a li")
    assert measured_start_up_s(tmp_path) is None
    (tmp_path / "attempts.jsonl").unlink()
    (tmp_path / "attempts.jsonl").mkdir()  # cannot be read
    assert measured_start_up_s(tmp_path) is None


@pytest.mark.parametrize(
    ("start_s", "words"),
    [
        (1000.0, "Slurm expects to start it at once on gpu[1-2]"),
        (8200.0, "Slurm expects to start it in 2 h 0 min (1970-01-01T02:16:40Z) on gpu[1-2]"),
        (4e9, "cannot say when it starts (it counts up to"),
        (None, "does not say when"),
    ],
)
def test_the_start_that_slurm_expects(start_s: float | None, words: str) -> None:
    assert words in start_words(StartEstimate(start_s, ("gpu1", "gpu2"), None), now=1000.0)
