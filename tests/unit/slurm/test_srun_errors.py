"""srun's own words on a step that it ended, as captured from real ones (22.05.8 and 24.11 say the same)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.jobs.attempt_outcome import StepFailure, read_step_failure

CAME_BACK = """\
srun: cluster configuration lacks support for cpu binding
srun: error: _server_write write failed: Bad file descriptor
srun: error: Aborting, io error and missing step on node 3
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: node2: task 2: Killed
srun: error: node1: task 1: Killed
srun: error: node0: task 0: Killed
srun: error: Timed out waiting for job step to complete
"""
MISSING = "Aborting, io error and missing step on node 3"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CAME_BACK, StepFailure(MISSING, True, 3)),
        (
            "srun: error: Aborting, step missing and io error on node 12\n",
            StepFailure("Aborting, step missing and io error on node 12", True, 12),
        ),
        (
            "srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 0\n",
            StepFailure("aborting, io error with slurmstepd on node 0", True, 0),
        ),
        (
            "srun: error: Cannot communicate with node 3.  Aborting job.\n",  # on a busy machine, 22.05
            StepFailure("Cannot communicate with node 3.  Aborting job.", True, 3),
        ),
        (
            "srun: error: Unable to create step for job 7: Invalid node name specified\n",
            StepFailure("Unable to create step for job 7: Invalid node name specified", False),
        ),
        (
            "srun: error: Task launch for StepId=7.0 failed on node node1: Communication connection failure\n"
            "srun: error: Application launch failed: Communication connection failure\n",
            StepFailure("Task launch for StepId=7.0 failed on node node1: Communication connection failure", False),
        ),
        # A task that ended by itself, and a node that went down, are no abort of srun's.
        ("srun: error: node2: task 2: Exited with exit code 1\n", None),
        ("srun: error: Node failure on node3\n", None),
        # What a task printed is no word of srun's.
        ("worker: srun said: Aborting, io error and missing step on node 3\n", None),
        ("", None),
    ],
)
def test_what_srun_did_by_itself_is_told_apart(text: str, expected: StepFailure | None) -> None:
    assert read_step_failure(text) == expected


@given(st.text(), st.text())
def test_any_text_around_it_changes_nothing(before: str, after: str) -> None:
    text = f"{before}\nsrun: error: {MISSING}\n{after}"
    failure = read_step_failure(text)
    assert failure is not None
    assert read_step_failure(before) or failure == StepFailure(MISSING, True, 3)
