"""`hpctrain bench recovery` with one fault, and what is left on the lab when somebody ends it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(600)]

BENCH = (sys.executable, "-m", "hpctrain", "bench", "recovery", "--lab", "--system", "hpctrain", "--state", "0.1")


def test_a_worker_is_killed(cluster, tmp_path: Path) -> None:
    words = ["--repeats", "1", "--case", "worker_killed", "--reference", "10", "-o", str(tmp_path), "--json"]
    record = json.loads(cluster.run(*BENCH, *words).stdout)
    (row,) = record["rows"]
    assert (row["case"], row["system"], row["n"], row["not_recovered"]) == ("worker_killed", "hpctrain", 1, 0)
    assert 0 < row["median_s"] == row["p95_s"] <= row["caught_up_s"]
    # The plan is the same, and so is every bit of the loss.
    assert row["loss_difference_max"] == 0
    assert row["redone_steps_max"] == row["lost_steps_max"]
    # All that was asked for is there: the same command starts nothing.
    assert json.loads(cluster.run(*BENCH, *words).stdout)["rows"] == [row]


def test_it_leaves_nothing_when_it_is_interrupted(cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ["--repeats", "1", "--case", "node_killed", "--reference", "0", "-o", str(tmp_path)]
    bench = cluster.start(*BENCH, *words, log=log)
    cluster.wait(lambda: cluster.run("squeue", "--noheader").stdout, 60, log.read_text)
    bench.send_signal(signal.SIGINT)
    assert bench.wait(timeout=400) == 1, log.read_text()
    assert "Aborted" in log.read_text()
    assert cluster.run("squeue", "--noheader").stdout == ""
