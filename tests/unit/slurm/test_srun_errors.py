"""srun's own words on a step that it did not start, as captured from real ones (22.05.8 and 24.11 say the same)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.jobs.attempt_outcome import step_failure_text

CAME_BACK = """\
srun: cluster configuration lacks support for cpu binding
srun: error: _server_write write failed: Bad file descriptor
srun: error: Aborting, io error and missing step on node 0
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: node3: task 0: Killed
srun: error: Timed out waiting for job step to complete
"""
REFUSED = "srun: error: Unable to create step for job 7: Requested node configuration is not available\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "srun: error: Unable to create step for job 7: Invalid node name specified\n",
            "Slurm could not start the step (srun: Unable to create step for job 7: Invalid node name specified)",
        ),
        (
            "srun: error: Task launch for StepId=7.0 failed on node node1: Communication connection failure\n"
            "srun: error: Application launch failed: Communication connection failure\n",
            "Slurm could not start the step (srun: Task launch for StepId=7.0 failed on node node1: "
            "Communication connection failure)",
        ),
        # A task that ended by itself, and a node that went down, are no abort of srun's.
        ("srun: error: node2: task 2: Exited with exit code 1\n", None),
        ("srun: error: Node failure on node3\n", None),
        # Nor is a lost node, on which the job script then tries to start the task again.
        ("srun: error: Node failure on node3\n" + REFUSED, None),
        (CAME_BACK + REFUSED, None),
        ("srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 0\n" + REFUSED, None),
        ("srun: error: Cannot communicate with node 3.  Aborting job.\n" + REFUSED, None),  # on a busy machine, 22.05
        # What a task printed is no word of srun's.
        ("worker: srun said: Unable to create step for job 7\n", None),
        ("", None),
    ],
)
def test_what_srun_did_by_itself_is_told_apart(text: str, expected: str | None) -> None:
    assert step_failure_text(text) == expected


@given(st.text(), st.text())
def test_any_text_after_it_changes_nothing(before: str, after: str) -> None:
    failure = step_failure_text(f"{before}\n{REFUSED}{after}")
    assert failure == step_failure_text(f"{before}\n{REFUSED}")
