"""Finds the checkpoint that a command names, and asks a worker process a question about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.base.errors import CheckpointError, HpctrainError, InputError
from hpctrain.base.process import Runner
from hpctrain.checkpoint.published import folder_name, listed, newest, step_of, verify
from hpctrain.launch.worker_request import worker_reply

Result = TypeVar("Result")

_ATTEMPTS = 5
"""How often a checkpoint is looked for, while the run removes each one that was found."""


def read_checkpoint(
    folder: Path, step: int | None, model_sha256: str, read: Callable[[Path | None], Result]
) -> Result:  # fmt: skip
    """Return `read(checkpoint)` for one checkpoint of the run in `folder`, after verifying the checkpoint's files. For
    step 0, the model before training, `checkpoint` is None.

    A run that is training removes old checkpoints. With a `step` of None, if the checkpoint is removed before `read`
    ends, `read` is called again, with the checkpoint that is then the newest, up to `_ATTEMPTS` times in all.

    Args:
        step: step of the checkpoint; None: the newest checkpoint that verifies and is of the run's model.
        model_sha256: hash of the run's model; a checkpoint of a given step is not compared with it.
        read: reads the checkpoint; an error of it is passed on if the checkpoint is still there.

    Raises:
        InputError: the run has no such checkpoint.
        CheckpointError: the checkpoint's files differ from what was written; or the run removed the checkpoint of the
            given step, or with a `step` of None the checkpoint of each attempt.
    """
    for _ in range(_ATTEMPTS):
        checkpoint: Path | None = None
        try:
            checkpoint = _checkpoint_of(folder, step, model_sha256)
            return read(checkpoint)
        except _RemovedError:
            pass
        except (HpctrainError, OSError):
            if checkpoint is None or checkpoint.exists():
                raise
        if step is not None:
            break
    which = "its checkpoints" if step is None else f"the checkpoint of step {step}"
    raise CheckpointError(
        f"{folder}: the run removed {which} while this command read it; set checkpoint.keep of the run to more, or "
        "wait for the end of the run"
    )


class _RemovedError(Exception):
    """A checkpoint was removed while it was verified."""


def _checkpoint_of(folder: Path, step: int | None, model_sha256: str) -> Path | None:
    checkpoints = folder / "checkpoints"
    if step == 0:
        return None
    if step is None:
        checkpoint, skipped = newest(checkpoints, model_sha256)
        if checkpoint is None:
            if not all(item.path.exists() for item in skipped):
                raise _RemovedError
            why = f" ({skipped[0].path.name}: {skipped[0].reason})" if skipped else ""
            raise InputError(
                f"{folder}: has no checkpoint yet{why}; it gets one every "
                "checkpoint.every steps; --step 0 takes the model before training"
            )
        return checkpoint.path
    path = checkpoints / folder_name(step)
    there = listed(checkpoints)
    if path not in there:
        steps = ", ".join(str(step_of(item)) for item in there) or "none"
        raise InputError(f"--step {step}: {folder} has no checkpoint of that step; it has: {steps}")
    try:
        verify(path)
    except CheckpointError as error:
        if not path.exists():
            raise _RemovedError from None
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
        CommandError: the process cannot be started.
    """
    places = {"folder": str(folder.resolve()), "checkpoint": None if checkpoint is None else str(checkpoint.resolve())}
    code, answer = worker_reply(verb, places | question, runner, does)
    if "error" in answer:
        raise (InputError if code == InputError.exit_code else HpctrainError)(answer["error"])
    return answer
