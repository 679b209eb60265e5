"""What energy a run used, from metrics-nodes.jsonl: in total, in useful steps, by step and token; and the carbon
dioxide that it stands for."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from hpctrain.records.history.node_log import NodeRow, read_node_log
from hpctrain.records.history.run_log import MetricRow, last_row_of_each_step
from hpctrain.records.run.energy import Energy
from hpctrain.records.run.run import Run

HOUR_S = 3600.0
GPU, HOST = "gpu", "host"


@dataclass(frozen=True)
class RunEnergy:
    """What energy a run used, as far as its nodes could read it. A figure that is not known is None."""

    total_j: float
    """Joules of all attempts, from the end of each probe on: GPUs, processors and memory that could be read."""
    gpu_j: float | None
    """Joules of the GPUs."""
    host_j: float | None
    """Joules of the machines without their GPUs."""
    steps_j: float
    """Joules of the useful steps: those that contributed to the model, from their beginnings to their ends. Starts,
    checkpoints that steps wait for, validation and steps that were lost are in `total_j` only."""
    step_j: float | None
    """Mean joules of a useful step; None if none was measured as a whole."""
    token_j: float | None
    """Mean joules of a token that the model read in useful steps."""
    carbon_g: float | None
    """Grams of CO2 equivalent that `total_j` stands for; None without `energy.carbon_intensity`."""
    power_w: float | None
    """Watts of all nodes together: the mean of each node's newest line, if that line began at most a minute, or three
    times its own length, before the end of the file's newest line."""
    node_hours: float
    """Hours that nodes measured, summed. They lack the time of probes and of agents that were lost, which
    `RunCost.node_hours` counts."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values; unknown values are absent."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_energy(folder: Path, run: Run, metrics: Sequence[MetricRow]) -> RunEnergy | None:
    """Return what energy a run has used so far; None if nothing was measured.

    Args:
        folder: the run folder.
        metrics: all rows of metrics.jsonl.

    Raises:
        FileError: metrics-nodes.jsonl cannot be read.
        UntrustedError: metrics-nodes.jsonl or its folder belongs to somebody else, or others can write to it.
    """
    return run_energy(read_node_log(folder), metrics, run.energy)


def run_energy(rows: Sequence[NodeRow], metrics: Sequence[MetricRow], settings: Energy) -> RunEnergy | None:
    """Return the energy in the rows of metrics-nodes.jsonl; None if they have none.

    Args:
        rows: the rows, in any order.
        metrics: all rows of metrics.jsonl.
        settings: section `energy` of the run file, which has the carbon intensity.
    """
    uses = list(_uses(rows))
    if not uses:
        return None
    curve = EnergyCurve(uses)
    by_kind = {kind: sum(use.joules for use in uses if use.kind == kind) for kind in {use.kind for use in uses}}
    steps_j, known = 0.0, []
    for row in last_row_of_each_step(list(metrics)):
        start = row.time_s - row.step_time_s
        steps_j += curve.joules(start, row.time_s)
        if curve.covers(start, row.time_s):
            known.append(row)
    known_j = sum(curve.joules(row.time_s - row.step_time_s, row.time_s) for row in known)
    tokens = sum(row.tokens for row in known)
    return RunEnergy(
        total_j=sum(by_kind.values()),
        gpu_j=by_kind.get(GPU),
        host_j=by_kind.get(HOST),
        steps_j=steps_j,
        step_j=known_j / len(known) if known else None,
        token_j=known_j / tokens if tokens else None,
        carbon_g=carbon_g(uses, settings),
        power_w=_power(rows),
        node_hours=sum(row.seconds for row in rows) / HOUR_S,
    )


@dataclass(frozen=True)
class EnergyUse:
    """The energy that one counter counted in a span of time."""

    kind: str
    """`GPU` or `HOST`."""
    start_s: float
    """Start of the span, in seconds since 1970."""
    end_s: float
    """End of the span."""
    joules: float


class EnergyCurve:
    """The energy of all counters together over time. Within a span of a counter, its power counts as constant."""

    def __init__(self, uses: Iterable[EnergyUse]) -> None:
        powers: dict[float, float] = defaultdict(float)
        counts: dict[float, int] = defaultdict(int)
        for use in uses:
            watts = use.joules / (use.end_s - use.start_s)
            for time_s, sign in ((use.start_s, 1), (use.end_s, -1)):
                powers[time_s] += sign * watts
                counts[time_s] += sign
        self._times = sorted(powers)
        self._watts = list(accumulate(powers[time_s] for time_s in self._times))
        self._is_counted = [count > 0 for count in accumulate(counts[time_s] for time_s in self._times)]
        self._joules, self._seconds = [0.0], [0.0]
        for index, (start, end) in enumerate(pairwise(self._times)):
            self._joules.append(self._joules[-1] + self._watts[index] * (end - start))
            self._seconds.append(self._seconds[-1] + self._is_counted[index] * (end - start))

    def joules(self, start_s: float, end_s: float) -> float:
        """Return the joules that were used between two times, in seconds since 1970."""
        return max(0.0, self._until(end_s)[0] - self._until(start_s)[0])

    def covers(self, start_s: float, end_s: float) -> bool:
        """Return whether a counter counted in at least 99 % of the time between two times, in seconds since 1970."""
        return self._until(end_s)[1] - self._until(start_s)[1] >= 0.99 * (end_s - start_s)

    def _until(self, time_s: float) -> tuple[float, float]:
        """Return (joules, seconds in which a counter counted) before a time."""
        index = bisect_right(self._times, time_s) - 1
        if index < 0:
            return 0.0, 0.0
        later_s = time_s - self._times[index]
        joules = self._joules[index] + self._watts[index] * later_s
        return joules, self._seconds[index] + self._is_counted[index] * later_s


class _Counters:
    """Until when each counter has been counted. Several nodes may have read a counter at the same time: virtual nodes
    of one machine, or the agents of two attempts. Each second of a counter counts once."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[str, str], float] = {}

    def uses(self, rows: Iterable[NodeRow]) -> Iterator[EnergyUse]:
        """Yield what each counter counted in `rows`, except in times that were counted before."""
        for row in sorted(rows, key=lambda row: row.time_s - row.seconds):
            readings = [(gpu.address, GPU, gpu.energy_j) for gpu in row.gpus or []]
            for counter, kind, joules in [*readings, (HOST, HOST, row.host_j())]:
                if joules is None:
                    continue
                until_s = self._until_s.get((row.machine, counter), float("-inf"))
                start = max(round(row.time_s - row.seconds, 3), until_s)
                if start >= row.time_s:
                    continue
                self._until_s[row.machine, counter] = row.time_s
                yield EnergyUse(kind, start, row.time_s, joules * (row.time_s - start) / row.seconds)


def _uses(rows: Iterable[NodeRow]) -> Iterator[EnergyUse]:
    return _Counters().uses(rows)


class EnergyMeter:
    """The energy of a run while its nodes write metrics-nodes.jsonl. Each row is added once; only the newest row of
    each node is kept."""

    def __init__(self, settings: Energy) -> None:
        self._settings = settings
        self._counters = _Counters()
        self._newest: dict[str, NodeRow] = {}
        self._total_j = 0.0
        self._carbon_g: float | None = None
        self._is_complete = False

    def add(self, rows: Iterable[NodeRow], is_complete: bool) -> None:
        """Add new rows.

        Args:
            is_complete: whether all rows that were written have been added.
        """
        new = list(rows)
        uses = list(self._counters.uses(new))
        self._total_j += sum(use.joules for use in uses)
        grams = carbon_g(uses, self._settings)
        self._carbon_g = None if grams is None else grams + (self._carbon_g or 0.0)
        self._newest |= {row.node: row for row in new}
        self._is_complete = is_complete

    @property
    def power_w(self) -> float | None:
        """Watts of the newest rows, as in `RunEnergy`; None if nothing was measured."""
        return _power(list(self._newest.values())) if self._newest else None

    @property
    def newest(self) -> list[NodeRow]:
        """The newest row of each node."""
        return list(self._newest.values())

    @property
    def total_j(self) -> float | None:
        """Joules of all attempts; None if nothing was measured, or some rows have not been added yet."""
        return self._total_j if self._total_j and self._is_complete else None

    @property
    def carbon_g(self) -> float | None:
        """Grams of CO2 equivalent of `total_j`; None if they are not known."""
        return None if self.total_j is None else self._carbon_g


def carbon_g(uses: Iterable[EnergyUse], settings: Energy) -> float | None:
    """Return the grams of CO2 equivalent of the energy, by the intensity of the hours in which it was used; None if
    the settings name no intensity."""
    if settings.carbon_intensity is None:
        return None
    total = 0.0
    for use in uses:
        start = use.start_s
        while start < use.end_s:
            end = min(use.end_s, (start // HOUR_S + 1) * HOUR_S)
            total += use.joules * (end - start) / (use.end_s - use.start_s) * (settings.grams_per_joule(start) or 0.0)
            start = end
    return total


def _power(rows: Sequence[NodeRow]) -> float | None:
    """Return the watts of all nodes together, as in `RunEnergy.power_w`; each counter of a machine counts once."""
    newest = {row.node: row for row in sorted(rows, key=lambda row: row.time_s)}
    until = max(row.time_s for row in rows)
    recent = [row for row in newest.values() if row.time_s - row.seconds >= until - max(60.0, 3 * row.seconds)]
    uses = list(_uses(_aligned(recent)))
    return sum(use.joules / (use.end_s - use.start_s) for use in uses) if uses else None


def _aligned(rows: Sequence[NodeRow]) -> list[NodeRow]:
    """Return rows as if all ended at the same time, so that a counter of several rows counts once."""
    return [row.model_copy(update={"time_s": rows[0].time_s}) for row in sorted(rows, key=lambda row: -row.seconds)]
