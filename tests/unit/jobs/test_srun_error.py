"""A step that srun ended by itself: the cluster's failure, in srun's words, unless the agents said something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.jobs.attempt_outcome import AttemptOutcome, srun_log, with_srun_error

KILLED = AttemptOutcome(137, "fatal")


def ended(folder: Path, outcome: AttemptOutcome, said: str | None) -> AttemptOutcome:
    path = srun_log(folder, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    if said is not None:
        path.write_text(said)
    return with_srun_error(outcome, folder, 3)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Unable to create step for job 7: Job/step already completing", "Slurm could not start the step (srun: "),
    ],
)
def test_what_srun_did_is_no_failure_of_the_training(tmp_path: Path, said: str, reason: str) -> None:
    found = ended(tmp_path, KILLED, f"srun: error: {said}\nsrun: error: gpu1: task 0: Killed\n")
    assert (found.exit_class, found.code, found.not_retryable) == ("infrastructure", 137, False)
    assert found.reason is not None
    assert found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            AttemptOutcome(1, "fatal", reason="the loss is nan"),
            "srun: error: Unable to create step for job 7: Job/step already completing\n",
        ),
        (AttemptOutcome(0, "done"), "srun: error: Unable to create step for job 7: Job/step already completing\n"),
        # A lost node, on which the job script then tries to start the task again, is no cause of the end.
        (KILLED, "srun: error: Node failure on gpu2\nsrun: error: Unable to create step for job 7: not available\n"),
        (KILLED, "srun: error: Aborting, io error and missing step on node 0\nsrun: error: task 0 launch failed\n"),
        (KILLED, "srun: error: gpu1: task 0: Killed\n"),
        (KILLED, None),
    ],
)
def test_otherwise_the_ending_stays_what_it_was(tmp_path: Path, outcome: AttemptOutcome, said: str | None) -> None:
    assert ended(tmp_path, outcome, said) == outcome
