"""A worker that sleeps while the others go on without its node, and wakes: it writes nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from train_site import Site, node_process, small_topology, wait_for, wait_for_step, worker_of

from hpctrain.agent.generation_store import GenerationStore
from hpctrain.checkpoint import published
from hpctrain.records.history.run_log import read_metrics
from hpctrain.records.plan.plan import Plan

SETTINGS = ["steps=1000000", "checkpoint.every=20", "recovery.spares=1", "recovery.heartbeat_timeout_s=3"]

pytestmark = pytest.mark.slow


def generations_of(checkpoints: Path) -> dict[str, int]:
    """The generation that wrote each published checkpoint."""
    found = {}
    for path in published.listed(checkpoints):
        try:
            found[path.name] = published.verify(path, hashes=False).generation
        except published.CheckpointError:
            continue  # it was just removed: others are newer
    return found


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_it_leaves_metrics_and_checkpoints_to_the_generation_that_began_meanwhile(site: Site) -> None:
    """One node trains, the other is a spare: the worker needs nobody to go on with its steps."""
    small_topology(2).write(site.path / "two.json")
    known = set((site.path / "runs").glob("*"))
    words = [word for text in SETTINGS for word in ("--set", text)]
    process = site.start("train", "run.yaml", "--local", "2", "--topology", "two.json", *words)
    folder = site.run_folder(known)
    stopped: list[psutil.Process] = []
    try:
        wait_for_step(folder, 25)
        # A thread of the worker writes it, which sleeps with the worker.
        wait_for(lambda: bool(published.listed(folder / "checkpoints")), 60, "a checkpoint from before")
        first = GenerationStore(folder / "generations").newest()
        assert first is not None
        [node] = Plan.read(folder / first.plan).nodes
        stopped = [node_process(folder, node), worker_of(folder, node)]
        for sleeper in stopped:
            sleeper.suspend()
        wait_for_step(folder, 45, generation=1)
        agent, worker = stopped
        worker.resume()
        wait_for(lambda: is_over(worker), 60, "the late worker ends")
        rows = read_metrics(folder / "metrics.jsonl")
        began = next(index for index, row in enumerate(rows) if row.generation == 1)
        assert {row.generation for row in rows[:began]} == {0}
        assert {row.generation for row in rows[began:]} == {1}
        second = GenerationStore(folder / "generations").newest()
        assert second is not None
        restored = int((second.restore or "step-0").rpartition("-")[2])
        for name, generation in generations_of(folder / "checkpoints").items():
            assert generation == 1 or int(name.rpartition("-")[2]) <= restored
        log = folder / "logs" / "0" / f"{node}.0.log"
        assert "generation 0 is over: generation 1 began meanwhile" in log.read_text()
        agent.resume()
        wait_for_step(folder, rows[-1].step + 5, generation=1)
    finally:
        for sleeper in stopped:
            if sleeper.is_running():
                sleeper.resume()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)
