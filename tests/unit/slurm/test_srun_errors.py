"""srun's own words on a step that it ended, as captured from real ones (22.05.8 and 24.11 say the same)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.jobs.attempt_outcome import step_failure_text

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
NODES = [f"gpu{number}" for number in range(13)]


def came_back(node: str, words: str) -> str:
    return f"{node} came back without its part of the step, and Slurm ended the step on all nodes (srun: {words})"


def cut_off(node: str, words: str) -> str:
    return f"{node} cannot be reached any more: Slurm ended the step on all nodes (srun: {words})"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CAME_BACK, came_back("gpu3", MISSING)),
        (
            "srun: error: Aborting, step missing and io error on node 12\n",
            came_back("gpu12", "Aborting, step missing and io error on node 12"),
        ),
        (
            "srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 0\n",
            cut_off("gpu0", "aborting, io error with slurmstepd on node 0"),
        ),
        (
            "srun: error: Cannot communicate with node 3.  Aborting job.\n",  # on a busy machine, 22.05
            cut_off("gpu3", "Cannot communicate with node 3.  Aborting job."),
        ),
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
        # What a task printed is no word of srun's.
        ("worker: srun said: Aborting, io error and missing step on node 3\n", None),
        ("", None),
    ],
)
def test_what_srun_did_by_itself_is_told_apart(text: str, expected: str | None) -> None:
    assert step_failure_text(text, NODES) == expected


@given(st.text(), st.text())
def test_any_text_around_it_changes_nothing(before: str, after: str) -> None:
    text = f"{before}\nsrun: error: {MISSING}\n{after}"
    failure = step_failure_text(text, NODES)
    assert failure is not None
    assert step_failure_text(before, NODES) or failure == came_back("gpu3", MISSING)
