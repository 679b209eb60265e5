"""Writes exit markers: files with which nodes tell the job script that they have left the attempt, and files that say
which node does the work of a job script that was lost with the batch node.

srun waits for a node that died as long as Slurm does, minutes on most clusters. The job script waits less long: it
stops when the markers say that so many nodes have left that the remaining agents cannot continue the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

from hpctrain.agent.decide import has_quorum
from hpctrain.base.atomic import storage_errors, write_text

EXIT_MARKERS_FOLDER = "left"
"""Folder in a run folder. Its files: <attempt>/<node> with the exit code of a node that left; <attempt>.code with the
exit code of an attempt that is over; <attempt>.closer with the name of the node that ends the attempt if the job script
is lost; <attempt>.seen, empty, written at the attempt's end by a job script that is not lost. The job script also
touches <attempt>.alive every second, and while it is lost, the node that keeps Slurm from ending the job touches
<attempt>.kept."""


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
    here = folder / EXIT_MARKERS_FOLDER / str(attempt)
    here.mkdir(parents=True, exist_ok=True)
    write_text(here / node, f"{code}\n")
    departed = [path.name for path in here.iterdir()]
    if too_few_left(departed, members, min_nodes):
        write_text(here.with_name(f"{attempt}.code"), f"{code}\n")
        if batch_host is not None and batch_host not in departed:
            with contextlib.suppress(FileExistsError), here.with_name(f"{attempt}.closer").open("x") as file:
                file.write(f"{node}\n")


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


def is_job_script_alive(folder: Path, attempt: int, batch_host: str | None = None) -> bool:
    """Whether the job script of an attempt has recorded that it has seen the attempt's end, or the agent of its node
    has left in order. Then the script ends the job, and no task has to.

    Args:
        batch_host: node of the job script.
    """
    # The folders are listed, as a parallel file system may cache for a while that a name does not exist.
    here = folder / EXIT_MARKERS_FOLDER
    left = here / str(attempt)
    if left.is_dir() and any(path.name == batch_host for path in left.iterdir()):
        return True
    return any(path.name == f"{attempt}.seen" for path in here.iterdir())


def too_few_left(departed: Collection[str], members: Sequence[str], min_nodes: int) -> bool:
    """Whether too few nodes remain to go on: fewer than `min_nodes`, or fewer than half of `members`.

    Args:
        departed: nodes that have left the attempt.
        members: nodes of the last generation.
    """
    remaining = set(members) - set(departed)
    return len(remaining) < min_nodes or not has_quorum(remaining, members)
