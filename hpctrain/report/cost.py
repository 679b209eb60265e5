"""What a run has cost: the node-hours and GPU-hours of its attempts, from attempts.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import FileError
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology


@dataclass(frozen=True)
class RunCost:
    """What all attempts of a run have cost."""

    hours: float
    """Hours of all attempts, summed; pauses between them do not count."""
    node_hours: float
    """Hours of each attempt times its nodes, summed."""
    gpu_hours: float | None
    """Hours of each attempt times its GPUs, summed; None without GPUs, or if their number is not known."""


def run_cost(
    folder: Path, run: Run, attempts: Sequence[Mapping[str, Any]], signs: Sequence[float], now: float | None
) -> RunCost:
    """Return what a run has cost.

    Args:
        folder: run folder, whose topology.json may be read.
        attempts: lines of attempts.jsonl.
        signs: times of all events and metrics of the run, seconds since 1970.
        now: up to when the newest attempt counts, if it is in progress; None: no attempt is in progress.

    Raises:
        UntrustedError: topology.json belongs to somebody else, or others can write to it.
    """
    spans = attempt_spans(attempts, signs, now)
    gpus = gpus_of_nodes(folder, run) if spans else None
    return RunCost(
        hours=sum(span.hours for span in spans),
        node_hours=sum(span.hours * len(span.nodes) for span in spans),
        gpu_hours=None if gpus is None else sum(span.hours * sum(map(gpus, span.nodes)) for span in spans),
    )


@dataclass(frozen=True)
class AttemptSpan:
    """When an attempt began and ended, on which nodes, and how."""

    start_s: float
    """Seconds since 1970."""
    end_s: float
    """Seconds since 1970; not before `start_s`."""
    nodes: list[str]
    values: Mapping[str, Any]
    """The attempt's line in attempts.jsonl."""

    @property
    def hours(self) -> float:
        """Hours from start to end."""
        return (self.end_s - self.start_s) / 3600.0

    @property
    def exit_class(self) -> str:
        """How the attempt ended, as in `ExitClass`; '' if it has not ended, or its end was not written."""
        return str(self.values.get("class", ""))


def attempt_spans(lines: Sequence[Mapping[str, Any]], signs: Sequence[float], now: float | None) -> list[AttemptSpan]:
    """Return the span of each attempt; a line without a usable start is left out. An attempt that is not in progress,
    and whose end was not written, counts up to the last of `signs` before the next attempt.

    Args:
        lines: lines of attempts.jsonl.
        signs: times of all events and metrics of the run, seconds since 1970.
        now: up to when the newest attempt counts, if it is in progress; None: none is.
    """
    starts = [(start, values) for values in lines if (start := _moment(values.get("start"))) is not None]
    spans = []
    for index, (start, values) in enumerate(starts):
        following = starts[index + 1][0] if index + 1 < len(starts) else math.inf
        end = _moment(values.get("end"))
        if end is None and now is not None and following == math.inf:
            end = now
        if end is None:
            end = max((sign for sign in signs if start <= sign < following), default=start)
        nodes = values.get("nodes")
        names = [name for name in nodes if isinstance(name, str)] if isinstance(nodes, list) else []
        spans.append(AttemptSpan(start, max(start, end), names, values))
    return spans


def _moment(value: object) -> float | None:
    """Return a time of a line of attempts.jsonl in seconds since 1970; None for any other value."""
    is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12
    return float(value) if is_time else None  # type: ignore[arg-type]


def gpus_of_nodes(folder: Path, run: Run) -> Callable[[str], float] | None:
    """Return a function (name of a node) -> number of GPUs that the run has on the node; None for a run on CPUs, or if
    the number is not known.

    The number is `cluster.devices_per_node`; without it, that of the GPUs that the run's probe found on the node. A
    node that the probe did not find counts with the largest number of GPUs of any node.

    Raises:
        UntrustedError: topology.json belongs to somebody else, or others can write to it.
    """
    if run.cluster.device == "cpu":
        return None
    if (named := run.cluster.devices_per_node) is not None:
        return lambda node: float(named)
    try:
        nodes = Topology.read(folder / "topology.json", owned=True).nodes
    except FileError:
        return None
    counts = {node.id: sum(device.id.startswith("cuda") for device in node.devices) for node in nodes}
    most = max(counts.values(), default=0)
    return (lambda node: float(counts.get(node, most))) if most else None
