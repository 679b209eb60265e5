"""Ask Slurm about a job before it is queued: `sbatch --test-only` with its job script."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hpctrain.base.clock import utc_text
from hpctrain.base.errors import CommandError, RefusedError
from hpctrain.base.units import format_seconds
from hpctrain.records.format.node_name import compress_node_set
from hpctrain.records.run.run import Run
from hpctrain.slurm.commands import Slurm, StartEstimate

HORIZON_S = 300 * 86400.0
"""Seconds; a start that is further away means nothing. Slurm assumes a year for a running job without a time limit, and
a thousand years for each such job that waits ahead (seen with 22.05 and 24.11). A job that waits because of a limit
also gets such a late start."""


def estimate_start(run: Run, script: str, slurm: Slurm, now: float) -> list[str]:
    """Return what sbatch would do with this script, as lines for a person; nothing is queued.

    Args:
        run: the run that the script is for.
        now: seconds since 1970.

    Raises:
        RefusedError: sbatch would refuse the job; the message quotes sbatch.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sh", prefix="hpctrain-") as file:
        file.write(script)
        file.flush()
        try:
            estimate = slurm.test_only(Path(file.name))
        except CommandError as error:
            return [f"not checked before submitting: whether Slurm takes the job ({error})"]
    if estimate.problem is not None:
        raise RefusedError(f"sbatch --test-only refuses the job: {estimate.problem}")
    # For a constraint with counts, Slurm 22.05 names nodes that the constraint excludes, although it allocates others
    # (seen).
    words = start_words(estimate, now, with_nodes=not run.cluster.groups)
    return [f"{words}, not counting the jobs it waits for" if run.cluster.after else words]


def start_words(estimate: StartEstimate, now: float, with_nodes: bool = True) -> str:
    """Return a sentence that says when the job would start if the queue stays as it is."""
    if estimate.start_s is None:
        return "Slurm takes the job and does not say when it would start"
    wait_s = estimate.start_s - now
    if wait_s > HORIZON_S:
        return (
            f"Slurm takes the job and cannot say when it starts (it counts up to {utc_text(estimate.start_s)[:4]}): "
            "its nodes are taken by jobs without a time limit, or a limit of your account or QOS holds it; once it "
            "waits, `hpctrain status` tells which"
        )
    when = "at once" if wait_s < 60 else f"in {format_seconds(wait_s)} ({utc_text(estimate.start_s)})"
    where = f" on {compress_node_set(estimate.nodes)}" if with_nodes else ""
    return f"Slurm expects to start it {when}{where}"
