"""Writes exit markers: files with which nodes tell the job script that they have left the attempt, and files that say
which node does the work of a job script that was lost with the batch node.

srun waits for a node that died as long as Slurm does, minutes on most clusters. The job script waits less long: it
stops when the markers say that so many nodes have left that the remaining agents cannot continue the run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from hpctrain.agent.decide import has_quorum
from hpctrain.base.atomic import create_text, storage_errors, write_text

EXIT_MARKERS_FOLDER = "left"
"""Folder in a run folder. Its files:

- <attempt>/<node>: exit code of a node that left.
- <attempt>.code: exit code of an attempt that is over.
- <attempt>.closer: name of the node that ends the attempt if the job script is lost. That node touches the file while
  it does so. <attempt>.closer.1, .2 and so on: the nodes that replaced it.
- <attempt>.seen: the job script is not lost; it writes the file at the attempt's end.
- <attempt>.alive: the job script touches it every second.
- <attempt>.since-<node>: the shell in which the job script runs the task of <node> watches the script.
- <attempt>.gone-<node>: the task of <node> has ended, and its shell waits for a sign of the job script.
- <attempt>.begun-<node>: the shell of <node> has started the batch node's task again.
- <attempt>.lost-<node>: the agent of <node> has lost the batch node's agent.
- <attempt>.kept: the script is lost. The node that keeps Slurm from ending the job touches it, as does the task that
  this node starts on a batch node that came back.
- <attempt>.returned: the batch node came back and has a task again, without the script.
"""


def write_exit_marker(
    folder: Path, attempt: int, node: str, members: Sequence[str], min_nodes: int, code: int,
    batch_host: str | None = None,
) -> None:  # fmt: skip
    """Write the exit marker of a node that has left the attempt with an exit code other than 0. If too few nodes remain
    then, also write <attempt>.code, on which the job script ends the attempt, and if the batch node has not left,
    <attempt>.closer: the batch node may be lost.

    Args:
        node: name of the node.
        members: nodes of the last generation, or of the attempt if it had no generation.
        min_nodes: recovery.min_nodes.
        code: the exit code.
        batch_host: node of the job's script; None if the run has no job of its own.

    Raises:
        StorageError: the marker cannot be written. If too few nodes remain because one was lost, the job then ends only
            when Slurm gives that node up.
    """
    write_departure(folder, attempt, node, code)
    departed = departed_nodes(folder, attempt)
    if too_few_left(departed, members, min_nodes):
        write_text(folder / EXIT_MARKERS_FOLDER / f"{attempt}.code", f"{code}\n")
        if batch_host is not None and (batch_host not in departed or has_returned(folder, attempt)):
            name_closer(folder, attempt, node)


def write_departure(folder: Path, attempt: int, node: str, code: int) -> None:
    """Write <attempt>/<node>, the exit code of a node that has left the attempt.

    Raises:
        StorageError: the file cannot be written.
    """
    here = folder / EXIT_MARKERS_FOLDER / str(attempt)
    with storage_errors(here):
        here.mkdir(parents=True, exist_ok=True)
    write_text(here / node, f"{code}\n")


def departed_nodes(folder: Path, attempt: int) -> list[str]:
    """Return the nodes that have left the attempt with an exit code other than 0."""
    # The folder is listed, as a parallel file system may cache for a while that a name does not exist.
    here = folder / EXIT_MARKERS_FOLDER / str(attempt)
    return [path.name for path in here.iterdir()] if here.is_dir() else []


def has_returned(folder: Path, attempt: int) -> bool:
    """Whether the batch node was lost and came back. It then has a task, and no job script."""
    return (folder / EXIT_MARKERS_FOLDER / f"{attempt}.returned").exists()


def report_batch_node_loss(folder: Path, attempt: int, node: str, batch_host: str | None, lost: str) -> None:
    """Tell the shell in which this node's task runs, by <attempt>.lost-<node>, that the agent of the batch node was
    lost. Do nothing if `lost` is another node, or if this shell does not watch the job script.

    Args:
        node: name of this node.
        batch_host: node of the job's script; None if the run has no job of its own.
        lost: node whose agent was lost.
    """
    here = folder / EXIT_MARKERS_FOLDER
    if lost == batch_host and (here / f"{attempt}.since-{node}").exists():
        with contextlib.suppress(OSError):  # the shell then notices it some seconds later
            (here / f"{attempt}.lost-{node}").touch()


def closer_files(folder: Path, attempt: int) -> list[Path]:
    """Return the files <attempt>.closer, <attempt>.closer.1 and so on that exist; the last one counts."""
    first = folder / EXIT_MARKERS_FOLDER / f"{attempt}.closer"
    files: list[Path] = []
    while (path := first.with_name(f"{first.name}.{len(files)}") if files else first).exists():
        files.append(path)
    return files


def closing_node(folder: Path, attempt: int) -> str | None:
    """Return the node that ends the attempt if the job script is lost; None if no node is named yet."""
    files = closer_files(folder, attempt)
    return files[-1].read_text().strip() if files else None


def name_closer(folder: Path, attempt: int, node: str, replaced: int = 0) -> bool:
    """Name the node that ends the attempt if the job script is lost, unless another node did so before. Return whether
    `node` is named. Of many nodes that call this, one is named.

    Args:
        replaced: number of nodes that were named before and are lost themselves.

    Raises:
        StorageError: the file cannot be written.
    """
    path = folder / EXIT_MARKERS_FOLDER / (f"{attempt}.closer.{replaced}" if replaced else f"{attempt}.closer")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return create_text(path, f"{node}\n")


def name_closing_node(folder: Path, attempt: int, node: str, members: Sequence[str], batch_host: str | None) -> None:
    """Record that this node ends the job of the finished run if the job script is lost. Nothing is recorded unless this
    node is the first one with ranks, and the batch node has no ranks or came back without the script.

    A batch node without ranks may be lost while the others finish the run. If it was not lost, its job script writes
    <attempt>.seen and ends the job itself.

    Args:
        node: name of this node.
        members: nodes with ranks in the last generation.
        batch_host: node of the job's script; None if the run has no job of its own.

    Raises:
        StorageError: the file cannot be written; the job then ends when Slurm gives up the batch node.
    """
    if batch_host is None or not members or node != members[0]:
        return
    if batch_host not in members or has_returned(folder, attempt):
        name_closer(folder, attempt, node)


def last_touch(path: Path) -> int | None:
    """Return when a file was touched, in ns by the clock of the file system; None if it does not exist."""
    try:
        # A file system that caches times asks its server when a file is opened.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


class ScriptWatch:
    """Watches for signs of the job script of an attempt, as one of the job's nodes sees its files."""

    def __init__(self, folder: Path, attempt: int, batch_host: str | None) -> None:
        """Begin to watch; `batch_host` is the node of the job script."""
        self.batch_host = batch_host
        self._folder, self._attempt = folder, attempt
        self._alive = folder / EXIT_MARKERS_FOLDER / f"{attempt}.alive"
        self._touched = last_touch(self._alive)

    def is_alive(self) -> bool:
        """Whether the script has recorded that it has seen the attempt's end, the agent of the script's node has
        written its exit marker, or the script has touched its file since this object was made. Then the script ends
        the job, and no task has to."""
        departed = self.batch_host in departed_nodes(self._folder, self._attempt)
        if departed and not has_returned(self._folder, self._attempt):
            return True
        seen = any(path.name == f"{self._attempt}.seen" for path in self._alive.parent.iterdir())
        return seen or last_touch(self._alive) != self._touched


def too_few_left(departed: Collection[str], members: Sequence[str], min_nodes: int) -> bool:
    """Whether too few nodes remain to go on: fewer than `min_nodes`, or fewer than half of `members`.

    Args:
        departed: nodes that have left the attempt.
        members: nodes of the last generation.
    """
    remaining = set(members) - set(departed)
    return len(remaining) < min_nodes or not has_quorum(remaining, members)
