"""Parses the errors that srun writes to stderr when it ends a step by itself or cannot start it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ERROR = re.compile(r"^srun: error: (?:\w+: )?(?P<words>.+)$", re.MULTILINE)
_ABORTED = re.compile(r"(?:aborting, .*\b|cannot communicate with )node (?P<index>\d+)", re.IGNORECASE)
"""'Aborting, io error and missing step on node 3', on a busy machine 'Cannot communicate with node 3.  Aborting job.'
(seen in 22.05 and 24.11): the slurmd of a lost node was restarted, and does not know the step or does not answer in
time. srun then ends the step on all nodes."""
_NOT_STARTED = re.compile(
    r"task launch for .* failed|application launch failed|unable to create step|task \d+ launch failed", re.IGNORECASE
)


@dataclass(frozen=True)
class StepFailure:
    """Why srun ended a step early."""

    words: str
    """srun's message, one line."""
    started: bool
    """Whether the step was started."""
    node_index: int | None = None
    """The node that srun names, counted from 0 in the step's list of nodes; None: it names none."""


def read_step_failure(text: str) -> StepFailure | None:
    """Return the first failure that srun reports; None where it reports none, and the tasks' exit codes decide.

    Args:
        text: srun's stderr.
    """
    for line in _ERROR.finditer(text):
        words = line["words"].strip()
        aborted = _ABORTED.match(words)
        if aborted:
            return StepFailure(words, True, int(aborted["index"]))
        if _NOT_STARTED.search(words):
            return StepFailure(words, False)
    return None
