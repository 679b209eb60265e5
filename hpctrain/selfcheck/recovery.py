"""The selfcheck's path of recovery: a real run on two virtual nodes, in which one worker is killed."""

from __future__ import annotations

import time
from pathlib import Path

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.process import SystemRunner
from hpctrain.launch.local_run import LocalJob, start
from hpctrain.launch.preflight.prepare import RunInputs, prepare
from hpctrain.launch.small_run import make_corpus, make_run
from hpctrain.records.history.run_log import last_row_of_each_step, read_events, read_metrics
from hpctrain.records.history.selfcheck import CheckResult
from hpctrain.records.run.run import Checkpoint
from hpctrain.selfcheck.paths import SEQ_LEN, SEQUENCES, SPEC

NODES = 2
SAVE_EVERY, KILL_AT = 10, 20
"""Steps between two checkpoints (`SAVE_EVERY`), and the step after which a worker is killed (`KILL_AT`)."""
LIMIT_S = 300.0
"""Time limit of the run in seconds; most of the time goes to the probe and to loading torch on both nodes."""


def check_recovery(folder: Path) -> CheckResult:
    """Train on two virtual nodes, kill a worker, and stop the run once it has recovered. The result's figure has the
    seconds from the kill to the next step.

    Args:
        folder: path of a folder to create; the caller removes it.

    Raises:
        HpctrainError: the run failed, did not recover within `LIMIT_S`, or lost a step.
    """
    folder.mkdir()
    make_corpus(folder / "corpus")
    make_run(folder / "given", folder / "corpus", SPEC, SEQUENCES, SEQ_LEN, checkpoint=Checkpoint(every=SAVE_EVERY))
    runner, clock = SystemRunner(), SystemClock()
    prepared = prepare(RunInputs(folder / "given" / "run.yaml"), runner, NODES)
    job = start(prepared, folder / "runs", runner, clock)
    fault = _Fault(job)
    try:
        ended = job.wait(fault.tick)
    finally:
        job.kill()
    if fault.seconds is None:
        what = "did not recover" if fault.injected else "made no steps"
        raise HpctrainError(f"the run {what}: {ended.reason}")
    steps = [row.step for row in last_row_of_each_step(read_metrics(job.folder.path / "metrics.jsonl"))]
    if steps != list(range(1, len(steps) + 1)):
        raise HpctrainError(f"steps are missing: the run reported {len(steps)}, the last is {steps[-1]}")
    figure = f"next step {fault.seconds:.1f} s after the kill, no step missing"
    return CheckResult(figure=figure, expected="every step, once")


class _Fault:
    """Kills one worker after the run has made `KILL_AT` steps, and stops the run once it has recovered. Kills the run
    if it has not recovered `LIMIT_S` seconds after this object was made."""

    def __init__(self, job: LocalJob) -> None:
        self.injected = False
        self.seconds: float | None = None
        """Seconds from the fault to the next step; None before that step."""
        self._job = job
        self._deadline = time.monotonic() + LIMIT_S

    def tick(self) -> None:
        """Read the run's metrics and events. Kill a worker once step `KILL_AT` is done, stop the run once it has
        recovered, and kill the run `LIMIT_S` seconds after this object was made. Called again and again while the run
        goes on."""
        folder = self._job.folder.path
        if self.seconds is not None:
            return
        if time.monotonic() > self._deadline:
            self._job.kill()
        elif self.injected:
            recovered = [event for event in read_events(folder / "events.jsonl") if event.kind == "recovered"]
            if recovered:
                self.seconds = float(recovered[0].data["seconds"])
                self._job.stop()
        elif any(row.step >= KILL_AT for row in read_metrics(folder / "metrics.jsonl")):
            self.injected = self._job.kill_workers(list(self._job.processes)[-1])
