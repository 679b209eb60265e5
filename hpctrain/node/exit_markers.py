"""Writes exit markers: files with which nodes tell the job script that they have left the attempt.

srun waits for a node that died as long as Slurm does, minutes on most clusters. The job script waits less long: it
stops when the markers say that so many nodes have left that the remaining agents cannot continue the run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from hpctrain.agent.decide import has_quorum
from hpctrain.base.atomic import storage_errors, write_text

EXIT_MARKERS_FOLDER = "left"
"""Folder in a run folder. Its files: <attempt>/<node> with the exit code of a node that left; <attempt>.code with the
exit code of an attempt that is over; <attempt>.closer with the name of the node that ends the job of a finished run if
the job script is lost; <attempt>.seen, empty, written by a job script that is not lost."""


def write_exit_marker(folder: Path, attempt: int, node: str, members: Sequence[str], min_nodes: int, code: int) -> None:
    """Write the exit marker of a node that has left the attempt with an exit code other than 0. If too few nodes remain
    then, also write <attempt>.code, on which the job script ends the attempt.

    Args:
        node: name of the node.
        members: nodes of the last generation, or of the attempt if it had no generation.
        min_nodes: recovery.min_nodes.
        code: the exit code.

    Raises:
        StorageError: the marker cannot be written. If too few nodes remain because one was lost, the job then ends only
            when Slurm gives that node up.
    """
    here = folder / EXIT_MARKERS_FOLDER / str(attempt)
    here.mkdir(parents=True, exist_ok=True)
    write_text(here / node, f"{code}\n")
    if too_few_left([path.name for path in here.iterdir()], members, min_nodes):
        write_text(here.with_name(f"{attempt}.code"), f"{code}\n")


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


def is_job_script_alive(folder: Path, attempt: int) -> bool:
    """Whether the job script of an attempt has recorded that it has seen the end of the run. If it has, the script ends
    the job, and no task has to."""
    # The folder is listed, as a parallel file system may cache for a while that a name does not exist.
    return any(path.name == f"{attempt}.seen" for path in (folder / EXIT_MARKERS_FOLDER).iterdir())


def too_few_left(departed: Collection[str], members: Sequence[str], min_nodes: int) -> bool:
    """Whether too few nodes remain to go on: fewer than `min_nodes`, or fewer than half of `members`.

    Args:
        departed: nodes that have left the attempt.
        members: nodes of the last generation.
    """
    remaining = set(members) - set(departed)
    return len(remaining) < min_nodes or not has_quorum(remaining, members)
