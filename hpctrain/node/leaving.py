"""A node that leaves an attempt unfinished says so, and the last that matters says that nobody is left to wait for.

srun waits for the task of a node that died for as long as Slurm does, minutes on most clusters. The job script stops
waiting when this says that the agents which have not left could not go on with the run either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from hpctrain.base.atomic import write_text

FOLDER = "left"
"""Folder in a run folder: <attempt>/<node> for each node that left; <attempt>.code when the attempt is over."""


def leave(folder: Path, attempt: int, node: str, members: Sequence[str], min_nodes: int, code: int) -> None:
    """Note that this node has left with an exit code other than 0.

    Args:
        members: nodes of the last generation, or of the attempt where there was none.

    Raises:
        StorageError: it cannot be written; the job then ends when Slurm gives the lost node up.
    """
    here = folder / FOLDER / str(attempt)
    here.mkdir(parents=True, exist_ok=True)
    write_text(here / node, f"{code}\n")
    if is_over([path.name for path in here.iterdir()], members, min_nodes):
        write_text(here.with_name(f"{attempt}.code"), f"{code}\n")


def is_over(left: Collection[str], members: Sequence[str], min_nodes: int) -> bool:
    """Whether those that have not left are too few to go on: below min_nodes, or below half of the last generation."""
    rest = len(set(members) - set(left))
    return rest < min_nodes or 2 * rest < len(members)
