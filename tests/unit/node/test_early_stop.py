"""A run that is told to stop while its nodes are still measured leaves at once, and can go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hpctrain.probe.protocol.run import COORDINATOR_FILE, PROBE_FOLDER
from hpctrain.records.history.run_log import read_events

RUN = {"steps": 1, "model": {"preset": "tiny-1m"}, "data": {"train": ["/data"]}, "batch": {"global": 8}}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_interrupts_the_probe(tmp_path: Path, number: signal.Signals) -> None:
    """The other node never joins; without the stop the probe would refuse after its deadline, with exit code 4."""
    tmp_path.chmod(0o700)
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    argv = [sys.executable, "-m", "hpctrain.node", "run", "--folder", str(tmp_path), "--attempt", "3", "--local"]
    node = subprocess.Popen([*argv, "--node", "a", "--nodes", "a,b", "--parent", str(os.getpid())])
    published = tmp_path / PROBE_FOLDER / COORDINATOR_FILE
    deadline = time.monotonic() + 120
    while not published.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    node.send_signal(number)
    assert node.wait(600) == 75
    last = read_events(tmp_path / "events.jsonl")[-1]
    assert (last.kind, last.reason.partition(";")[0]) == (
        "preempted", f"asked to stop by {number.name} before the training began",
    )  # fmt: skip
    assert not published.parent.exists()
    assert not [child for child in psutil.Process().children(recursive=True) if "hpctrain.node" in child.cmdline()]
