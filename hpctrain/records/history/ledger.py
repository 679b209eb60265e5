"""Records of a run over all its jobs: its attempts, the jobs that were queued to continue it, and bad nodes.

attempts.jsonl has one line per attempt. successors.jsonl has one line per job that was queued behind another.
bad_nodes.jsonl has the nodes that had faults, the reason, and how long the run's next jobs exclude them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from hpctrain.records.format.document import Document
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.format.node_name import NODE_NAME

ATTEMPTS_FILE = "attempts.jsonl"

ExitClass = Literal["done", "resumable", "infrastructure", "fatal", "no_progress"]
"""How an attempt ended. done: the run is finished. resumable: the attempt was asked to stop (preemption, time limit, a
user). infrastructure: nodes or the network failed. fatal: the training itself failed. no_progress: the attempt ended
without a new checkpoint, and another attempt would end in the same way."""
FAILED_CLASSES = ("infrastructure", "fatal", "no_progress")
"""Exit classes of attempts that ended by a fault."""
COUNTED_AGAINST_RETRIES = ("fatal", "no_progress")
"""Exit classes that count against recovery.retries; the run is not to blame for the other exit classes."""


def is_new_checkpoint(before: str | None, newest: str | None) -> bool:
    """Return whether an attempt or a generation saved a new checkpoint, which resets the count of failures. The
    arguments are the names of the newest checkpoint before and after it; None: there was no checkpoint."""
    return newest is not None and newest != before


def retries_spent_text(failures: int, retries: int) -> str | None:
    """Return why the run ends after this number of failures; None if it may be tried again.

    Args:
        failures: failures in a row without a new checkpoint, the last one included.
        retries: recovery.retries.
    """
    if failures <= retries:
        return None
    count = "1 failure" if failures == 1 else f"{failures} failures in a row"
    return f"{count} without a new checkpoint (recovery.retries is {retries})"


def last_end_text(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return how the last ended attempt ended, as text: 'attempt 0 ended (infrastructure): …'. None if no attempt has
    ended, or if the last one finished the run. `lines` are the lines of attempts.jsonl."""
    ended = next((line for line in reversed(lines) if line.get("reason") and "end" in line), None)
    if ended is None or ended.get("class") == "done":
        return None
    return f"attempt {ended.get('attempt', 0)} ended ({ended.get('class', 'unknown')}): {ended['reason']}"


def attempts_without_checkpoint(lines: Sequence[dict[str, Any]]) -> int:
    """Return the number of attempts after the last one that saved a checkpoint, without attempts of exit class
    `resumable`. `lines` are the lines of attempts.jsonl."""
    count = 0
    for line in reversed(lines):
        if _saved_checkpoint(line):
            break
        count += line.get("class") != "resumable"
    return count


def failures_since_checkpoint(lines: Sequence[dict[str, Any]], bad: Collection[str] = ()) -> int:
    """Return the number of failed attempts since the last new checkpoint, which count against recovery.retries.

    An attempt that saved a checkpoint and then failed counts as the first failure after the checkpoint. An attempt does
    not count if only nodes that a later probe confirmed to be bad had faults in it.

    Args:
        lines: lines of attempts.jsonl.
        bad: nodes that a probe after the last of these attempts confirmed to be bad.
    """
    count, confirmed = 0, set(bad)
    for line in reversed(lines):
        confirmed |= set(line.get("confirmed", ()))
        count += line.get("class") in COUNTED_AGAINST_RETRIES and not _caused_by_bad_nodes(line, confirmed)
        if _saved_checkpoint(line):
            break
    return count


def _caused_by_bad_nodes(line: dict[str, Any], bad: Collection[str]) -> bool:
    faults = set(line.get("faults", ()))
    return bool(faults) and faults <= set(bad)


def _saved_checkpoint(line: dict[str, Any]) -> bool:
    return is_new_checkpoint(line.get("checkpoint_before"), line.get("checkpoint_after"))


SUCCESSORS_FILE = "successors.jsonl"
"""Name of the file in a run folder that lists its successors; hpctrain only adds lines."""


class Successor(Document):
    """A line of successors.jsonl: a job that was queued to continue the run when another job has ended in any way."""

    schema_kind: ClassVar[str] = "successor"

    job_id: str
    """Id of the successor's job."""
    after: str
    """Id of the job that the successor waits for."""
    exclude: list[str] = []
    """Nodes that the successor's job excludes, as it was queued."""
    time_s: float
    """When the successor was queued, seconds since 1970."""


def read_successors(folder: Path) -> list[Successor]:
    """Return all successors in successors.jsonl of a run folder, in the order in which they were queued.

    Raises:
        FileError: the file cannot be read, or a line is no valid successor.
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    path = folder / SUCCESSORS_FILE
    return [Successor.from_json(value, str(path)) for value in read_jsonl(path)]


def job_chain(job: str | None, successors: Sequence[Successor]) -> list[str]:
    """Return the ids of the jobs that led to `job`, each queued behind the one before it: first the job that the user
    submitted, last `job` itself. The list is empty if `job` is None, as for a run without Slurm."""
    if job is None:
        return []
    before = {item.job_id: item.after for item in successors}
    chain = [job]
    while before.get(chain[0]) not in (None, *chain):
        chain.insert(0, before[chain[0]])
    return chain


def queued_behind(job: str, successors: Sequence[Successor]) -> list[str]:
    """Return the ids of the successors that wait for `job` or for another of these successors, in the order in which
    they start.
    """
    queue = [job]
    for item in successors:
        if item.after in queue and item.job_id not in queue:
            queue.append(item.job_id)
    return queue[1:]


BAD_NODES_FILE = "bad_nodes.jsonl"
"""Name of the file in a run folder that lists bad nodes. hpctrain only adds lines; users may remove lines."""


class BadNode(Document):
    """A line of bad_nodes.jsonl: one node that had a fault in one attempt."""

    schema_kind: ClassVar[str] = "bad_node"

    node: str = Field(pattern=NODE_NAME)
    """Name of the node."""
    attempt: int
    """Attempt in which the node had a fault."""
    time_s: float
    """When the line was written, seconds since 1970."""
    expires_s: float
    """When new jobs may use the node again, seconds since 1970."""
    reason: str
    """Why the node is excluded, in one sentence."""


def read_bad_nodes(folder: Path) -> list[BadNode]:
    """Return all lines of bad_nodes.jsonl in a run folder, also those that have expired.

    Raises:
        FileError: the file cannot be read, or a line is invalid, for example because `node` is no host name.
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    path = folder / BAD_NODES_FILE
    return [BadNode.from_json(value, str(path)) for value in read_jsonl(path)]
