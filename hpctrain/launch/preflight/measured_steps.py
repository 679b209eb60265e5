"""Finds the time of a step that an earlier run measured on the nodes that a job may get. The earlier run has the same
model, batch, objective, precision, parallelism, compression and kind of devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from hpctrain.base.errors import HpctrainError
from hpctrain.records.format.input_file import read_jsonl_tail
from hpctrain.records.run.run import Run, run_of
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.folder import RunFolder

MOST_RUNS = 100
"""Most run folders that are looked into, the newest first."""
TAIL_BYTES = 2**20
"""Bytes at the end of metrics.jsonl that are read; a long run has more."""
LEAST_STEPS = 20
"""Fewest steps from which a time is taken."""


@dataclass(frozen=True)
class MeasuredStep:
    """The time of a step in an earlier run, in seconds."""

    run: str
    """Name of the run folder."""
    median_s: float
    """Median seconds of a step."""
    range_s: tuple[float, float]
    """Quantiles 0.1 and 0.9 of the seconds of a step."""


def measured_step(runs: Path, run: Run, nodes: frozenset[str], count: int, part: bool) -> MeasuredStep | None:
    """Return the time of a step in the newest run that did the same work in the same way on `count` of `nodes`; None
    without such a run. Folders that cannot be read are skipped.

    Args:
        runs: folder of run folders.
        run: the run that is to be queued.
        nodes: names of the nodes that its job may get.
        count: number of nodes that its job asks for.
        part: whether its job has only a part of each node; runs on whole nodes then do not count, nor the other way
            round.
    """
    folders = sorted(runs.glob("*/metrics.jsonl"), key=_changed_s, reverse=True)[:MOST_RUNS]
    for path in (file.parent for file in folders):
        try:
            earlier, attempts = run_of(path), RunFolder(path).attempts()
            last = set(attempts[-1].get("nodes", ())) if attempts else set()
            if _work(earlier) != _work(run) or len(last) != count or not last <= nodes or _had_part(path) != part:
                continue
            times = _step_times(path / "metrics.jsonl")
        except (HpctrainError, OSError, TypeError):
            continue
        if len(times) >= LEAST_STEPS:
            tenths = quantiles(times, n=10)
            return MeasuredStep(path.name, median(times), (tenths[0], tenths[-1]))
    return None


def _had_part(folder: Path) -> bool:
    """Return whether a run had only a part of each node, as its topology says; False without a topology."""
    path = folder / "topology.json"
    return path.exists() and Topology.read(path, owned=True).provenance.shared


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _work(run: Run) -> tuple[object, ...]:
    """Return what decides the time of a step on given nodes."""
    cluster = run.cluster
    return (
        run.model, run.batch, run.data.seq_len, run.objective, run.precision, run.tf32, run.compile, run.parallel,
        run.compression, cluster.kind, cluster.device, cluster.devices_per_node, cluster.gpu_type,
    )  # fmt: skip


def _step_times(path: Path) -> list[float]:
    """Return the seconds of each step of the newest generation in the last `TAIL_BYTES` of metrics.jsonl at `path`,
    without the first of these steps: the first step of a generation compiles and allocates."""
    lines = read_jsonl_tail(path, TAIL_BYTES)
    rows = [(line.get("generation"), line.get("step_time_s")) for line in lines]
    newest = [seconds for generation, seconds in rows if generation == rows[-1][0]][1:]
    return [float(seconds) for seconds in newest if isinstance(seconds, int | float) and seconds > 0]
