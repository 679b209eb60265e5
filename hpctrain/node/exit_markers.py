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
from hpctrain.base.atomic import storage_errors, write_text

EXIT_MARKERS_FOLDER = "left"
"""Folder in a run folder. Its files: <attempt>/<node> with the exit code of a node that left; <attempt>.code with the
exit code of an attempt that is over; <attempt>.closer with the name of the node that ends the attempt if the job script
is lost; <attempt>.seen, empty, written at the attempt's end by a job script that is not lost. The job script also
touches <attempt>.alive every second, and while it is lost, the node that keeps Slurm from ending the job touches
<attempt>.kept, as does the step that this node starts on a batch node that came back."""


def write_exit_marker(
    folder: Path, attempt: int, node: str, members: Sequence[str], min_nodes: int, code: int,
    batch_host: str | None = None,
) -> None:  # fmt: skip
    """Write the exit marker of a node that has left the attempt with an exit code other than 0. If too few nodes remain
    then, also write <attempt>.code, on which the job script ends the attempt, and if the batch node has not left,
    <attempt>.closer: the batch node may be lost. The first node to write <attempt>.closer is its content.

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
        if batch_host is not None and batch_host not in departed:
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


def name_closer(folder: Path, attempt: int, node: str) -> None:
    """Write <attempt>.closer, unless it names a node already.

    Raises:
        StorageError: the file cannot be written.
    """
    path = folder / EXIT_MARKERS_FOLDER / f"{attempt}.closer"
    with storage_errors(path), contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(f"{node}\n")


def closing_node(folder: Path, attempt: int) -> str | None:
    """Return the node that <attempt>.closer names; None if the file does not exist or is not written yet."""
    path = folder / EXIT_MARKERS_FOLDER / f"{attempt}.closer"
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None


def name_closing_node(folder: Path, attempt: int, node: str, members: Sequence[str], batch_host: str | None) -> None:
    """Record that this node ends the job of the finished run if the job script is lost. Nothing is recorded unless this
    node is the first one with ranks and the batch node has no ranks.

    A batch node without ranks may be lost while the others finish the run. If it was not lost, its job script writes
    <attempt>.seen and ends the job itself.

    Args:
        node: name of this node.
        members: nodes with ranks in the last generation.
        batch_host: node of the job's script; None if the run has no job of its own.

    Raises:
        StorageError: the file cannot be written; the job then ends when Slurm gives up the batch node.
    """
    if batch_host is None or batch_host in members or not members or node != members[0]:
        return
    path = folder / EXIT_MARKERS_FOLDER / f"{attempt}.closer"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"{node}\n")


class ScriptWatch:
    """Watches for signs of the job script of an attempt, as one of the job's nodes sees its files."""

    def __init__(self, folder: Path, attempt: int, batch_host: str | None) -> None:
        """`batch_host`: node of the job script."""
        self.batch_host = batch_host
        self._folder, self._attempt = folder, attempt
        self._touched = self._last_touch()

    def is_alive(self) -> bool:
        """Whether the script has recorded that it has seen the attempt's end, the agent of its node has left in order,
        or the script has touched its file since this object was made. Then the script ends the job, and no task has
        to."""
        if self.batch_host in departed_nodes(self._folder, self._attempt):
            return True
        seen = any(path.name == f"{self._attempt}.seen" for path in (self._folder / EXIT_MARKERS_FOLDER).iterdir())
        return seen or self._last_touch() != self._touched

    def _last_touch(self) -> int | None:
        """Return when <attempt>.alive was touched, in ns by the clock of the file system; None if it does not exist."""
        try:
            # A file system that caches times asks its server when a file is opened.
            with (self._folder / EXIT_MARKERS_FOLDER / f"{self._attempt}.alive").open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None


def too_few_left(departed: Collection[str], members: Sequence[str], min_nodes: int) -> bool:
    """Whether too few nodes remain to go on: fewer than `min_nodes`, or fewer than half of `members`.

    Args:
        departed: nodes that have left the attempt.
        members: nodes of the last generation.
    """
    remaining = set(members) - set(departed)
    return len(remaining) < min_nodes or not has_quorum(remaining, members)
