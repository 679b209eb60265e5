"""Find the logs of a run by attempt, node or rank."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import FileError, InputError
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.event import Event, read_events
from hpctrain.records.plan.plan import Plan
from hpctrain.report.log_lines import LogFile


def find_logs(
    folder: Path, node: str | None = None, rank: int | None = None, attempt: int | None = None
) -> list[LogFile]:
    """Return the logs of a run: those of its job scripts, agents and workers.

    Args:
        node: select the output of this node's agent and workers.
        rank: select the output of this global rank. The worker with this rank changes with the generation.
        attempt: select this attempt; a job script and its agents write one log for all attempts of a job.

    Raises:
        InputError: workers were started, and none of them was this rank.
        FileError: a file of the run is damaged.
    """
    logs = folder / "logs"
    if rank is not None:
        files = _of_rank(folder, rank)
    else:
        paths = sorted(logs.rglob("*.log"))
        files = [LogFile(path, _source(path, logs), is_script=path.name.endswith(".job.log")) for path in paths]
    if attempt is not None:
        jobs = _jobs(folder, attempt)
        files = [file for file in files if _of_attempt(file.path.relative_to(logs), attempt, jobs)]
    return [file for file in files if node is None or _of_node(file.path.name, node)]


def _source(path: Path, logs: Path) -> str:
    return str(path.relative_to(logs).with_suffix(""))


def _jobs(folder: Path, attempt: int) -> set[str]:
    lines = read_jsonl(folder / "attempts.jsonl")
    return {str(line.get("job_id")) for line in lines if line.get("attempt") == attempt}


def _of_attempt(path: Path, attempt: int, jobs: set[str]) -> bool:
    """Whether a log belongs to an attempt: it lies in the attempt's folder, or is a log of the attempt's job."""
    if len(path.parts) > 1:
        return path.parts[0] == str(attempt)
    return path.name.partition(".")[0] in jobs


def _of_node(name: str, node: str) -> bool:
    """Whether a log belongs to a node: NODE.RANK.log of a worker, NODE.agent.log or JOB.NODE.agent.log of an agent."""
    if re.fullmatch(rf"{re.escape(node)}\.\d+\.log", name):
        return True
    # Slurm uses the short host name in the names of log files.
    return any(re.fullmatch(rf"(\d+\.)?{re.escape(form)}\.agent\.log", name) for form in (node, node.split(".")[0]))


def _of_rank(folder: Path, rank: int) -> list[LogFile]:
    """Return the logs of the workers that had this rank, each limited to the time of their generations."""
    starts = [event for event in read_events(folder / "events.jsonl") if event.kind == "generation_started"]
    spans: dict[Path, list[tuple[float, float]]] = {}
    most = 0
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        ranks = _ranks(folder, start)
        most = max(most, len(ranks))
        if rank < len(ranks):
            end = following.time_s if following is not None else math.inf
            spans.setdefault(_worker_log(folder, start.attempt, ranks, rank), []).append((start.time_s, end))
    if most and not spans:
        raise InputError(f"--rank: found {rank}; the run's plans have ranks 0 to {most - 1}")
    logs = folder / "logs"
    return [
        LogFile(path, f"{_source(path, logs)} (rank {rank})", tuple(times))
        for path, times in spans.items()
        if path.exists()
    ]


def _ranks(folder: Path, start: Event) -> Sequence[DeviceId]:
    """Return the device of each rank in the generation that `start` began."""
    try:
        return Plan.read(folder / str(start.data.get("plan", "plan.json")), owned=True).ranks
    except FileError:
        return []


def _worker_log(folder: Path, attempt: int, ranks: Sequence[DeviceId], rank: int) -> Path:
    """Return the log of a rank's worker; the workers of a node are numbered in the order of their ranks."""
    node = ranks[rank].node
    local = sum(device_id.node == node for device_id in ranks[:rank])
    return folder / "logs" / str(attempt) / f"{node}.{local}.log"
