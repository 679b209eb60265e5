"""successors.jsonl: the jobs that were queued to continue a run, each behind the previous one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from hpctrain.records.format.document import Document
from hpctrain.records.format.jsonl import read_jsonl

SUCCESSORS_FILE = "successors.jsonl"
"""File in a run folder; lines are only added."""


class Successor(Document):
    """A line of successors.jsonl: one job that starts when another job has ended in any way."""

    schema_kind: ClassVar[str] = "successor"

    job_id: str
    after: str
    """Id of the job that the successor waits for."""
    exclude: list[str] = []
    """Nodes that the successor's submission excluded."""
    time_s: float
    """When it was queued, seconds since 1970."""


def read_successors(folder: Path) -> list[Successor]:
    """Return every successor of the run, in the order in which they were queued.

    Raises:
        FileError: a line is no valid successor.
    """
    path = folder / SUCCESSORS_FILE
    return [Successor.from_json(value, str(path)) for value in read_jsonl(path)]


def job_chain(job: str | None, successors: Sequence[Successor]) -> list[str]:
    """Return the ids of the jobs that led to `job`: first the one that the user submitted, last `job` itself.

    The list is empty for a run without a job.
    """
    if job is None:
        return []
    before = {item.job_id: item.after for item in successors}
    chain = [job]
    while before.get(chain[0]) not in (None, *chain):
        chain.insert(0, before[chain[0]])
    return chain


def queued_behind(job: str, successors: Sequence[Successor]) -> list[str]:
    """Return the ids of the jobs that wait for `job`, directly or indirectly, the next one first."""
    queue = [job]
    for item in successors:
        if item.after in queue and item.job_id not in queue:
            queue.append(item.job_id)
    return queue[1:]
