"""Reads errors of torch.distributed.checkpoint (DCP), and silences its warning about a process that saves or loads
alone."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch.distributed.checkpoint as dcp

from hpctrain.base.atomic import storage_errors
from hpctrain.base.errors import StorageError


@contextlib.contextmanager
def quiet_alone() -> Iterator[None]:
    """Silence torch's warning that a process saves or loads alone, in the `with` block: here that is no mistake."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def failure_reason(error: dcp.api.CheckpointException, path: Path) -> str:
    """Return why DCP could not write to the folder `path`, in one line. The reason is the file system's error if it
    also refuses a test file in the folder now, else the error of the lowest rank that failed."""
    refusal = _refusal(path)
    if refusal is not None:
        return f"{path}: cannot write: {refusal}"
    rank, cause = first_failure(error)
    return f"{path}: rank {rank} cannot write: {last_line(cause)}"


def first_failure(error: dcp.api.CheckpointException) -> tuple[int, BaseException]:
    """Return the lowest rank that failed, and its error."""
    return min(causes_of(error).items(), key=lambda item: item[0])


def causes_of(error: dcp.api.CheckpointException) -> dict[int, BaseException]:
    """Return number of a rank -> its error, for all ranks that failed; {0: the error itself} if DCP names none."""
    causes = {rank: failure[0] for rank, failure in error.failures.items()}  # each with a summary of its traceback
    return causes or {0: error}


def last_line(cause: BaseException) -> str:
    """Return the last line of an error's text, else the name of its class."""
    lines = str(cause).strip().splitlines()
    return lines[-1] if lines else type(cause).__name__


def _refusal(folder: Path) -> str | None:
    """Write 1 MiB to a file in the folder, as a test, and remove it. Return the file system's error, or None if the
    write works.

    The test is needed because torch's writer reports a full disk as a wrong file position, without the system's error.
    """
    probe = folder / ".room"
    try:
        with storage_errors(probe), probe.open("wb") as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except StorageError as error:
        cause = error.__cause__
        return str(cause.strerror) if isinstance(cause, OSError) else str(error)
    finally:
        with contextlib.suppress(OSError):  # a read-only file system refuses this even if there is no such file
            probe.unlink()
    return None
