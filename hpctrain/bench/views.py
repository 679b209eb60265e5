"""`hpctrain bench views`: CPU time of `hpctrain list`, first and again, and of `hpctrain watch` on a long run.

The run folders are made up, with files of the sizes that real runs leave behind.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError
from hpctrain.base.module_argv import program
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import Runner
from hpctrain.bench.record import make_record
from hpctrain.jobs.run_status import WatchedRun
from hpctrain.records.history.rank_log import RANK_LOG, RankRow
from hpctrain.records.history.run_log import BytesSent, Event, MetricRow
from hpctrain.report.watch.run_view import WatchedFigures, run_view
from hpctrain.report.watch.text_fit import Screen

RANKS = 64
"""Ranks of the long run, on nodes of four devices."""
RANK_STEPS = 16
"""Steps between two lines of a rank in metrics-ranks.jsonl, as a run of `RANKS` ranks writes them."""
ENDED_STEPS = 1000
"""Steps of each ended run."""
LOOKS = 20
"""Looks at the long run after the first one, whose median counts."""


@dataclass(frozen=True)
class ViewTimes:
    """CPU seconds of a view: of a whole `hpctrain list`, or of one look of `hpctrain watch` with its drawing."""

    case: str
    first_s: float
    """The first time, when nothing is known of the runs."""
    again_s: float
    """Median of the further times."""


def measure(
    runner: Runner, runs: Sequence[int], steps: int, repeats: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure `hpctrain list` with each number of ended runs, and `hpctrain watch` on a run of `steps` steps; return
    the record of the bench.

    Args:
        repeats: times that each list is printed again.

    Raises:
        CommandError: a list could not be printed.
    """
    rows = []
    for count in runs:
        progress(f"list of {count} ended runs")
        with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name, owner_only():
            _make_run(first := Path(name) / "runs" / "ended-20260101T000000Z-0000", ENDED_STEPS, is_done=True)
            for number in range(1, count):
                shutil.copytree(first, first.with_name(f"ended-20260101T000000Z-{number:04x}"))
            times = [_list_s(runner, Path(name)) for _ in range(1 + repeats)]
        rows.append(ViewTimes(f"list of {count} ended runs", times[0], statistics.median(times[1:])))
    progress(f"watch of a run of {steps} steps")
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name, owner_only():
        _make_run(Path(name) / "long", steps, is_done=False)
        rows.append(ViewTimes(f"watch of a run of {steps} steps", *_watch_s(Path(name) / "long")))
    return make_record("views", rows, {"runs": list(runs), "steps": steps, "repeats": repeats, "ranks": RANKS})


def _list_s(runner: Runner, folder: Path) -> float:
    """Return the CPU seconds of `hpctrain list` of the runs in `folder`/runs, whose state home is `folder`, too."""
    env = {**os.environ, "HPCTRAIN_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = runner.run([*program("hpctrain"), "list", "--here", "--json"], env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.code:
        raise CommandError(f"hpctrain list: exit code {result.code}: {result.stderr.strip()[-500:]}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _watch_s(folder: Path) -> tuple[float, float]:
    clock, times = SystemClock(), []
    start = time.process_time()
    watched = WatchedRun(folder, clock)
    for step in range(1 + LOOKS):
        status = watched.look()
        run_view(WatchedFigures(watched.live, status, watched.job, None, clock.wall()), Screen(80, 24))
        now = time.process_time()
        times.append(now - start)
        _append(folder / "metrics.jsonl", [_step_row(10**6 + step)])
        start = time.process_time()
    return times[0], statistics.median(times[1:])


def _make_run(folder: Path, steps: int, is_done: bool) -> None:
    folder.mkdir(parents=True)
    values = {
        "name": "ended", "steps": steps if is_done else 2 * steps, "model": {"preset": "tiny-1m"},
        "data": {"train": ["/data"]}, "batch": {"global": 8}, "cluster": {"kind": "slurm", "nodes": RANKS // 4},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(values))
    events = [_event("attempt_started", 0.0, nodes=["node0"]), _event("generation_started", 1.0, members=["node0"])]
    events += [_event("checkpoint_saved", float(step), step=step) for step in range(100, steps, 1000)]
    events += [_event("finished", float(steps), step=steps, loss=2.0)] if is_done else []
    _append(folder / "events.jsonl", events)
    _append(folder / "metrics.jsonl", [_step_row(step) for step in range(1, steps + 1)])
    if not is_done:
        _append(folder / RANK_LOG, [
            _rank_row(rank, step) for step in range(RANK_STEPS, steps + 1, RANK_STEPS) for rank in range(RANKS)
        ])  # fmt: skip


def _append(path: Path, items: Sequence[Event | MetricRow | RankRow]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(item.to_json()) + "\n" for item in items)


START_S = 1_760_000_000.0


def _event(kind: Any, at_s: float, **data: Any) -> Event:
    return Event(kind=kind, time_s=START_S + at_s, attempt=0, generation=0, node="node0", reason="", data=data)


def _step_row(step: int) -> MetricRow:
    return MetricRow(
        step=step, generation=0, time_s=START_S + step, step_time_s=1.0, loss=2 + 8 * math.exp(-step / 1000), lr=1e-3,
        grad_norm=1.0, tokens=8192, samples=8 * step, tokens_per_s=8192.0 + step % 100,
        bytes_sent=BytesSent(dp=12_000_000, pp=3_000_000), stage_time_s=[0.5] * 4, stage_forward_s=[0.2] * 4,
        stage_backward_s=[0.3] * 4, bubble_fraction=0.2, micro_batches=[8] * 16, memory_bytes_max=3e9,
    )  # fmt: skip


def _rank_row(rank: int, step: int) -> RankRow:
    return RankRow(
        step=step, steps=RANK_STEPS, generation=0, rank=rank, device=f"node{rank // 4}:cuda{rank % 4}",
        stages=[rank % 4], forward_s=[0.2 + rank / 1000], backward_s=[0.3], wait_pp_s=0.1, wait_dp_s=0.1,
        wait_world_s=0.02, wait_device_s=0.0, hidden_dp_s=0.05, memory_bytes=3e9,
    )  # fmt: skip
