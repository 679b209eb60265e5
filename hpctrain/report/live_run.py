"""Follows a run while it goes on: each read of its files continues where the last one ended. Slurm's state of the job
is added to the run's status."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import FileError
from hpctrain.records.format.file_tail import FileTail, rows_of, sampled_values
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.history.ledger import ATTEMPTS_FILE
from hpctrain.records.history.node_log import NODE_LOG, NodeRow
from hpctrain.records.history.rank_log import RANK_LOG, RankRow
from hpctrain.records.history.run_log import Event, MetricRow
from hpctrain.records.run.run import Run, run_of
from hpctrain.report.binned_curve import BinnedCurve
from hpctrain.report.energy import EnergyMeter
from hpctrain.report.rank_times import TAIL_BYTES, newest_layers, newest_rows, slow_rank_text
from hpctrain.report.status import RunStatus, State, decide_status, lock_held
from hpctrain.slurm.job import JobInfo, needs_action, pending_job_text

POLL_S = 0.2


def follow(
    folder: Path, clock: Clock, until: Callable[[], bool], poll_s: float = POLL_S, since_s: float = 0.0
) -> Iterator[MetricRow | Event]:
    """Yield the metrics and events of a run as they are written, from the first one on; what one poll finds is sorted
    by time.

    A line that this version of hpctrain cannot read is left out, so that a view never fails on it.

    Args:
        folder: run folder.
        until: checked before each poll; once it returns True, the remaining lines are yielded and the iteration ends.
        poll_s: seconds between two polls while nothing is written.
        since_s: seconds since 1970; what was written before is left out.

    Raises:
        UntrustedError: another user owns a file or the run folder, or can write to it.
    """
    events, metrics = FileTail(folder / "events.jsonl"), FileTail(folder / "metrics.jsonl")
    over = False
    while not over:
        over = until()
        items: list[MetricRow | Event] = [*rows_of(Event, events.values()), *rows_of(MetricRow, metrics.values())]
        yield from sorted((item for item in items if item.time_s >= since_s), key=lambda item: item.time_s)
        if not over and not items:
            clock.sleep(poll_s)


ROWS = 2000
"""Most metrics rows that a live view keeps in memory; the view shows figures of the last rows only."""
METRICS_BYTES = 1 << 22
"""Bytes at the end of metrics.jsonl that are read at first: more than `ROWS` rows of a run of few ranks."""
SAMPLED_ROWS = 256
"""Most rows that are sampled from the part of metrics.jsonl before its last `METRICS_BYTES`, for the curves of a long
run."""
NODE_BYTES = 1 << 19
"""Most bytes of metrics-nodes.jsonl that one `read` takes."""


class LiveRun:
    """A run with all events and the last `ROWS` rows of metrics that `read` has found in its files so far."""

    def __init__(self, folder: Path, all_rows: bool = False) -> None:
        """Open the run in `folder`.

        Args:
            all_rows: whether the first `read` returns all rows of metrics.jsonl, not only those of its last
                `METRICS_BYTES`.

        Raises:
            FileError: run.yaml is missing or invalid.
            UntrustedError: another user owns the file or the folder, or can write to it.
        """
        self.folder = folder
        self.run: Run = run_of(folder)
        self.events: list[Event] = []
        self.rows: deque[MetricRow] = deque(maxlen=ROWS)
        self.held = False
        """Whether a process held the folder at the last read."""
        self.ranks: list[RankRow] = []
        """The newest row of each rank, in the order of ranks."""
        self.layers: list[LayerFigures] = []
        """The newest figures of each layer over all ranks."""
        self.loss, self.tokens_per_s = BinnedCurve(), BinnedCurve()
        self.energy = EnergyMeter(self.run.energy)
        metrics = FileTail(folder / "metrics.jsonl", None if all_rows else METRICS_BYTES)
        self._tails = FileTail(folder / "events.jsonl"), metrics
        self._rank_tail = FileTail(folder / RANK_LOG, TAIL_BYTES)
        self._node_tail = FileTail(folder / NODE_LOG, call_bytes=NODE_BYTES)
        if not all_rows:
            self._add_to_curves(rows_of(MetricRow, sampled_values(metrics.path, SAMPLED_ROWS, METRICS_BYTES)))

    def read(self) -> list[Event | MetricRow]:
        """Return the events and metrics that were written since the last call of `read`, sorted by time; at the first
        call those in the files so far (see `all_rows`). The object keeps them for its method `status`.

        Raises:
            UntrustedError: another user owns a file or the run folder, or can write to it.
        """
        # Check the lock before the files: if the run ends in between, its files already say how it ended.
        self.held = lock_held(self.folder)
        events, rows = (tail.values() for tail in self._tails)
        new: list[Event | MetricRow] = [*rows_of(Event, events), *rows_of(MetricRow, rows)]
        self.events += [item for item in new if isinstance(item, Event)]
        steps = [item for item in new if isinstance(item, MetricRow)]
        self.rows.extend(steps)
        self._add_to_curves(steps)
        ranks = self._rank_tail.values()
        self.ranks = newest_rows(ranks) or self.ranks
        self.layers = newest_layers(ranks) or self.layers
        self.energy.add(rows_of(NodeRow, self._node_tail.values()), self._node_tail.is_at_end)
        return sorted(new, key=lambda item: item.time_s)

    def _add_to_curves(self, rows: Iterable[MetricRow]) -> None:
        for row in rows:
            self.loss.add(row.step, row.loss)
            self.tokens_per_s.add(row.step, row.tokens_per_s)

    def read_run(self) -> None:
        """Read run.yaml again, because a run that was resubmitted may have other settings. A damaged file changes
        nothing.

        Raises:
            UntrustedError: another user owns the file or the folder, or can write to it.
        """
        try:
            self.run = run_of(self.folder)
        except FileError:
            return  # run.yaml cannot be read: keep the settings of the last read

    def status(self, now: float) -> RunStatus:
        """Return the run's status by the files as last read; repeated steps are counted only among the rows in memory.

        Args:
            now: wall clock, seconds since 1970.

        Raises:
            FileError, UntrustedError: attempts.jsonl cannot be read, or is not trusted.
        """
        attempts = read_jsonl(self.folder / ATTEMPTS_FILE)
        slow_rank = slow_rank_text(self.ranks)
        return decide_status(self.run, self.events, list(self.rows), now, self.held, attempts, slow_rank=slow_rank)


HORIZON_S = 300 * 86400.0
"""Seconds from now beyond which Slurm's estimate of a job's start is ignored. Behind a job without a time limit, Slurm
assumes that the job ends in a year."""


def with_job(status: RunStatus, job: JobInfo | None, now: float, cancelled: bool = False) -> RunStatus:
    """Return a run's status, combined with Slurm's state of the run's job.

    Args:
        status: status by the run's files.
        job: what Slurm says of the job; None if Slurm has forgotten the job, as it does some minutes after the end, and
            accounting has no record either.
        now: wall clock, seconds since 1970.
        cancelled: whether a person cancelled the run; then the job's end counts as no failure.
    """
    if status.state == "done":
        return status
    if cancelled and (job is None or job.is_waiting or job.is_ended):
        return replace(status, state="cancelled", reason="cancelled; `hpctrain resubmit` goes on with it")
    if job is None:
        if status.state in ("failed", "cancelled"):
            return status
        return replace(status, state="failed", reason=f"Slurm knows the job no more; last: {status.reason}")
    status = replace(status, job_state=job.state)
    if job.is_waiting:
        state: State = "requeued" if job.restarts or status.step or status.attempt else "queued"
        reason = f"job {job.job_id}: {pending_job_text(job, now)}"
        start_s = job.start_s if job.start_s is not None and now < job.start_s < now + HORIZON_S else None
        action = needs_action(job) or None
        return replace(status, state=state, reason=reason, expected_start_s=start_s, needs_action=action)
    if not job.is_ended:
        if status.state in ("queued", "unknown", "requeued"):
            return replace(status, state="starting", reason=f"job {job.job_id} is {job.state.lower()}")
        if status.state == "failed":
            # The agents gave up, but the end of the job decides whether the run continues.
            reason = f"{status.reason}; its job {job.job_id} is {job.state.lower()} still"
            return replace(status, state="recovering", reason=reason)
        return status
    if job.state == "CANCELLED":
        return replace(status, state="cancelled", reason=f"job {job.job_id} was cancelled")
    if status.state == "failed":
        return status
    return replace(status, state="failed", reason=f"job {job.job_id} ended: {job.state}, exit code {job.exit_code}")


def with_remark(status: RunStatus, remark: str) -> RunStatus:
    """Return a copy of `status`, which was found from the run's files alone, with `remark` at the end of its reason.
    The remark says why the status does not include Slurm's state of the job."""
    return replace(status, reason=f"{status.reason}; {remark}")
