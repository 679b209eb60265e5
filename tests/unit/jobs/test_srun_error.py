"""A step that srun ended by itself: the cluster's failure, in srun's words, unless the agents said something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.jobs.attempt_outcome import AttemptOutcome, srun_log, with_srun_error

NODES = ["gpu1", "gpu2"]
KILLED = AttemptOutcome(137, "fatal")


def ended(folder: Path, outcome: AttemptOutcome, said: str | None) -> AttemptOutcome:
    path = srun_log(folder, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    if said is not None:
        path.write_text(said)
    return with_srun_error(outcome, folder, 3, NODES)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Aborting, io error and missing step on node 1", "gpu2 came back without its part of the step, and Slurm"),
        ("Aborting, io error and missing step on node 7", "a lost node came back without its part of the step"),
        ("f: aborting, io error with slurmstepd on node 0", "gpu1 cannot be reached any more: Slurm ended the step"),
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
            "srun: error: Aborting, io error and missing step on node 1\n",
        ),
        (AttemptOutcome(0, "done"), "srun: error: Aborting, io error and missing step on node 1\n"),
        (KILLED, "srun: error: gpu1: task 0: Killed\n"),
        (KILLED, None),
    ],
)
def test_otherwise_the_ending_stays_what_it_was(tmp_path: Path, outcome: AttemptOutcome, said: str | None) -> None:
    assert ended(tmp_path, outcome, said) == outcome
