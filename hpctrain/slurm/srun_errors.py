"""What srun says on stderr when it ends a step by itself, or cannot start it. A pure parser."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ERROR = re.compile(r"^srun: error: (?:\w+: )?(?P<words>.+)$", re.MULTILINE)
_ABORTED = re.compile(r"(?:aborting, .*\b|cannot communicate with )node (?P<index>\d+)", re.IGNORECASE)
"""'Aborting, io error and missing step on node 3', on a busy machine 'Cannot communicate with node 3.  Aborting job.'
(22.05 and 24.11, seen): slurmd of a lost node started anew, knows nothing of the step there or does not answer in time,
and srun ends the step on all nodes."""
_NOT_STARTED = re.compile(
    r"task launch for .* failed|application launch failed|unable to create step|task \d+ launch failed", re.IGNORECASE
)


@dataclass(frozen=True)
class StepFailure:
    """Why srun ended a step that was not at its end."""

    words: str
    """srun's own, one line."""
    started: bool
    """False: the step could not be started."""
    node_index: int | None = None
    """The node that srun speaks of, counted from 0 in the step's list of nodes; None: it names none."""


def read_step_failure(text: str) -> StepFailure | None:
    """The first failure that srun tells of; None where it tells of none: the tasks' own ends say what happened then.

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
