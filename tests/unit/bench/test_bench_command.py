"""`hpctrain bench`: real measurements, kept short; the figures themselves are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hpctrain.bench.runtime import ThroughputSettings, measure
from hpctrain.cli.main import cli
from hpctrain.records.model.decoder_spec import DecoderSpec


def bench(*argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "hpctrain", "bench", *argv],
        env=env, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_ten_kills_lose_nothing() -> None:
    done = CliRunner().invoke(cli, ["bench", "checkpoint", "--kills", "10", "--json"])
    assert done.exit_code == 0, done.output[-3000:]
    found = json.loads(done.stdout)["kills"]
    assert (found["kills"], found["lost"], found["older"], found["corrupt"]) == (10, 0, 0, [])
    assert found["while_writing"] >= 1
    assert found["last_step"] >= 5


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_runtime_bench_gives_its_rows() -> None:
    small = ThroughputSettings(
        pairs=2, block_steps=2, warm_steps=1, rows=4, seq_len=32, spec=DecoderSpec(layers=2, dim=32, heads=2, vocab=320)
    )
    told: list[str] = []
    record = measure(("dp2", "pp2"), small, told.append)
    assert told == [row["case"] for row in record["rows"]] == ["dp2", "pp2"]
    for row in record["rows"]:
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
    replicas, pipeline = record["rows"]
    assert replicas["ours_cpu_s"] > 0
    assert pipeline["low"] > 1, "no schedule beats its ideal"


def test_an_unknown_case_is_answered_with_those_there_are() -> None:
    done = CliRunner().invoke(cli, ["bench", "runtime", "--case", "pp3"])
    assert done.exit_code == 2
    assert "'one_process', 'dp2', 'pp2', 'layers', 'layers_dp2'" in done.stderr


@pytest.mark.slow
def test_the_bench_of_views_lists_and_watches_its_own_runs() -> None:
    done = bench("views", "--runs", "3", "--steps", "200", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)["rows"]
    assert [row["case"] for row in rows] == ["list of 3 ended runs", "watch of a run of 200 steps"]
    assert all(row["again_s"] > 0 for row in rows)
