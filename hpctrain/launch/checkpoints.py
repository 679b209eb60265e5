"""Finds the checkpoint that a command names, and asks a worker process a question about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.base.errors import CheckpointError, HpctrainError, InputError
from hpctrain.base.process import Runner
from hpctrain.checkpoint.published import folder_name, listed, newest, verify
from hpctrain.launch.worker_request import worker_reply


def checkpoint_of(folder: Path, step: int | None, model_sha256: str) -> Path | None:
    """Return the folder of one checkpoint of the run in `folder`, after verifying the checkpoint's files; None for step
    0: the model before training has no checkpoint.

    Args:
        step: step of the checkpoint; None: the newest checkpoint that verifies and is of the run's model.
        model_sha256: hash of the run's model; a checkpoint of a given step is not compared with it.

    Raises:
        InputError: the run has no such checkpoint.
        CheckpointError: the checkpoint's files differ from what was written.
    """
    checkpoints = folder / "checkpoints"
    if step == 0:
        return None
    if step is None:
        checkpoint, skipped = newest(checkpoints, model_sha256)
        if checkpoint is None:
            why = f" ({skipped[0].path.name}: {skipped[0].reason})" if skipped else ""
            raise InputError(
                f"{folder}: has no checkpoint yet{why}; it gets one every "
                "checkpoint.every steps; --step 0 takes the model before training"
            )
        return checkpoint.path
    path = checkpoints / folder_name(step)
    there = listed(checkpoints)
    if path not in there:
        steps = ", ".join(str(int(item.name.rpartition("-")[2])) for item in there) or "none"
        raise InputError(f"--step {step}: {folder} has no checkpoint of that step; it has: {steps}")
    try:
        verify(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; leave --step out for the newest that is whole") from None
    return path


def ask_worker(
    verb: str, folder: Path, checkpoint: Path | None, runner: Runner, does: str, **question: object
) -> dict[str, Any]:
    """Return the answer of a new worker process to a request about a run's model.

    Args:
        verb: command of `hpctrain.worker`: eval or export.
        folder: the run folder.
        checkpoint: folder of the checkpoint; None: the model before training.
        does: what the process does, as a verb for error messages ("exports").
        question: values of the request, besides `folder` and `checkpoint`.

    Raises:
        InputError: the worker reported wrong input.
        HpctrainError: the worker reported another error, or ended without an answer.
    """
    places = {"folder": str(folder.resolve()), "checkpoint": None if checkpoint is None else str(checkpoint.resolve())}
    code, answer = worker_reply(verb, places | question, runner, does)
    if "error" in answer:
        raise (InputError if code == InputError.exit_code else HpctrainError)(answer["error"])
    return answer


def step_of(checkpoint: Path | None) -> int:
    """Return the step of a checkpoint's folder; 0 for None, the model before training."""
    return 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
