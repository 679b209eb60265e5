"""What Slurm itself says of a job before it is queued: `sbatch --test-only` with the very script."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.clock import utc_text
from hpctrain.base.errors import CommandError, Refused
from hpctrain.base.units import format_seconds
from hpctrain.records.run import Run
from hpctrain.slurm.commands import Slurm, StartEstimate

NEVER_S = 300 * 86400.0
"""Slurm gives a start years from now to a job that a limit keeps from starting."""


def estimate_start(run: Run, script: str, slurm: Slurm, now: float) -> list[str]:
    """What sbatch would do with this script, as lines for the person; nothing is queued.

    Args:
        run: what the script is of.
        now: seconds since 1970.

    Raises:
        Refused: sbatch would not take it; its own words are told.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sh", prefix="hpctrain-") as file:
        file.write(script)
        file.flush()
        try:
            estimate = slurm.test_only(Path(file.name))
        except CommandError as error:
            return [f"not checked before submitting: whether Slurm takes the job ({error})"]
    if estimate.problem is not None:
        raise Refused(f"sbatch --test-only refuses the job: {estimate.problem}")
    # Slurm 22.05 tells nodes that the counts of a constraint would not allow, although it gives others (seen).
    words = start_words(estimate, now, with_nodes=not run.cluster.groups)
    return [f"{words}, not counting the jobs it waits for" if run.cluster.after else words]


def start_words(estimate: StartEstimate, now: float, with_nodes: bool = True) -> str:
    """When the job would start, if the queue stays as it is."""
    if estimate.start_s is None:
        return "Slurm takes the job and does not say when it would start"
    wait_s = estimate.start_s - now
    if wait_s > NEVER_S:
        return (
            "Slurm takes the job, and some limit keeps it from ever starting (the start it expects is "
            f"{utc_text(estimate.start_s)}): ask for fewer nodes or less time, or look at your account's limits"
        )
    when = "at once" if wait_s < 60 else f"in {format_seconds(wait_s)} ({utc_text(estimate.start_s)})"
    where = f" on {NodeSet.fromlist(list(estimate.nodes))}" if with_nodes else ""
    return f"Slurm expects to start it {when}{where}"
