"""Reads srun's stderr for the reason why a step ended; the job script writes it to a file beside the workers' logs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.base.errors import UntrustedError
from hpctrain.base.owned_files import open_owned
from hpctrain.jobs.attempt_outcome import AttemptOutcome
from hpctrain.slurm.srun_errors import StepFailure, read_step_failure

SRUN_LOG_NAME = "srun.txt"
"""File in logs/<attempt> with srun's stderr; the job's log has the same lines."""
SRUN_LOG_BYTES_MAX = 2**18
"""Bytes of srun.txt that are read. The first error is the cause; after it, srun names each task that it ends."""


def srun_log(folder: Path, attempt: int) -> Path:
    """Return the file with srun's stderr of an attempt's step."""
    return folder / "logs" / str(attempt) / SRUN_LOG_NAME


def with_srun_error(outcome: AttemptOutcome, folder: Path, attempt: int, nodes: Sequence[str]) -> AttemptOutcome:
    """Return the outcome; if srun itself ended the step, return it as an infrastructure failure with srun's message.

    An outcome that is done, or has a reason from the agents, is returned as it is.

    Args:
        nodes: nodes of the step, in Slurm's order.
    """
    if outcome.exit_class == "done" or (outcome.reason is not None and not outcome.crashed):
        return outcome
    try:
        with os.fdopen(open_owned(srun_log(folder, attempt)), "rb") as file:
            failure = read_step_failure(file.read(SRUN_LOG_BYTES_MAX).decode(errors="replace"))
    except (OSError, UntrustedError):
        return outcome
    if failure is None:
        return outcome
    return replace(outcome, exit_class="infrastructure", reason=step_failure_text(failure, nodes), not_retryable=False)


def step_failure_text(failure: StepFailure, nodes: Sequence[str]) -> str:
    """Return what happened, with the node's name instead of its number."""
    if not failure.started:
        return f"Slurm could not start the step (srun: {failure.words})"
    index = failure.node_index
    node = nodes[index] if index is not None and index < len(nodes) else "a lost node"
    why = "came back without its part of the step, and" if "missing" in failure.words else "cannot be reached any more:"
    return f"{node} {why} Slurm ended the step on all nodes (srun: {failure.words})"
