"""The plain loop that `hpctrain bench recovery` compares with: it goes on from the newest state that it saved."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from hpctrain.base.module_argv import program
from hpctrain.base.process import SystemRunner, end_process
from hpctrain.bench.recovery.lab_jobs import spec_of
from hpctrain.bench.recovery.plain_training import STATE_FILE, STEPS_FILE, PlainSettings


def rows(folder: Path) -> list[dict[str, float]]:
    path = folder / STEPS_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_until(folder: Path, count: int) -> None:
    """Train in one process until the file has so many steps; then it is killed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    argv = [*program("hpctrain.bench.recovery.plain_training"), str(folder)]
    environ = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo"}
    process = SystemRunner().start(argv, env=environ, log=folder / "log")
    try:
        while len(rows(folder)) < count:
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
    finally:
        end_process(process)


def test_the_plain_loop_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    PlainSettings(spec_of(100_000), 4, 16, 1e-3, 1.0, save_every=5, collective_timeout_s=10.0).write(tmp_path)
    train_until(tmp_path, 7)
    assert (tmp_path / STATE_FILE).exists()
    before = rows(tmp_path)
    train_until(tmp_path, len(before) + 3)
    after = rows(tmp_path)[len(before) :]
    assert after[0]["step"] % 5 == 1
    assert after[0]["step"] > 5
    assert after[0]["life"] > before[0]["life"]
    # The same state and the same samples give the same loss again.
    losses = {row["step"]: row["loss"] for row in before}
    again = [row for row in after if row["step"] in losses]
    assert [row["loss"] for row in again] == [losses[row["step"]] for row in again]
