"""A node that leaves an attempt unfinished says so, and the last that matters says that nobody is left to wait for.

srun waits for the task of a node that died for as long as Slurm does, minutes on most clusters. The job script stops
waiting when this says that the agents which have not left could not go on with the run either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from hpctrain.base.atomic import storage_errors, write_text

EXIT_MARKERS_FOLDER = "left"
"""Folder in a run folder: <attempt>/<node> for each node that left; <attempt>.code when the attempt is over;
<attempt>.closer names the node that ends the job of a finished run whose script is lost, <attempt>.seen says that it is
not lost."""


def write_exit_marker(folder: Path, attempt: int, node: str, members: Sequence[str], min_nodes: int, code: int) -> None:
    """Note that this node has left with an exit code other than 0.

    Args:
        members: nodes of the last generation, or of the attempt where there was none.

    Raises:
        StorageError: it cannot be written; the job then ends when Slurm gives the lost node up.
    """
    here = folder / EXIT_MARKERS_FOLDER / str(attempt)
    here.mkdir(parents=True, exist_ok=True)
    write_text(here / node, f"{code}\n")
    if too_few_left([path.name for path in here.iterdir()], members, min_nodes):
        write_text(here.with_name(f"{attempt}.code"), f"{code}\n")


def name_closing_node(folder: Path, attempt: int, node: str, members: Sequence[str], batch_host: str | None) -> None:
    """Note that this node ends the job of the finished run: the first one that worked, where the batch node did not.

    A batch node that is a spare may be lost without anybody noticing; if it is there, its script says so in time.

    Args:
        members: nodes with ranks in the last generation.
        batch_host: node of the job's script; None where there is no job of the run's own.

    Raises:
        StorageError: it cannot be written; the job then ends when Slurm gives the batch node up.
    """
    if batch_host is None or batch_host in members or not members or node != members[0]:
        return
    path = folder / EXIT_MARKERS_FOLDER / f"{attempt}.closer"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"{node}\n")


def is_job_script_alive(folder: Path, attempt: int) -> bool:
    """Whether the job's script has seen that the run is finished: then it ends the job itself."""
    # A listing, as a file system of many machines remembers for a while that a name was not there.
    return any(path.name == f"{attempt}.seen" for path in (folder / EXIT_MARKERS_FOLDER).iterdir())


def too_few_left(left: Collection[str], members: Sequence[str], min_nodes: int) -> bool:
    """Whether those that have not left are too few to go on: below min_nodes, or below half of the last generation."""
    rest = len(set(members) - set(left))
    return rest < min_nodes or 2 * rest < len(members)
