"""Arguments of the functions of `hpctrain.api`, and what becomes of lines for a person.

Lines go to the function `progress`; without one, they go to the logger `hpctrain`: warnings as warnings, all else as
info.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.api.loaded_run import LoadedRun, load_run
from hpctrain.base.errors import InputError, RefusedError
from hpctrain.records.format.yaml_file import parse_scalar

AnyPath = str | os.PathLike[str]
Progress = Callable[[str], None]
"""Function that is called with each line for a person."""

_log = logging.getLogger("hpctrain")


def reporter(progress: Progress | None) -> Progress:
    """Return `progress`, or if it is None a function that logs each line at level INFO."""
    return progress or _log.info


def line_reporter(progress: Progress | None) -> Callable[[Iterable[str]], None]:
    """Return a function that calls `reporter(progress)` with each line of its argument."""
    say = reporter(progress)

    def say_all(lines: Iterable[str]) -> None:
        for line in lines:
            say(line)

    return say_all


def report_warnings(progress: Progress | None, lines: Iterable[str]) -> None:
    """Call `progress` with each of the lines, or if it is None log the lines as warnings."""
    for line in lines:
        (progress or _log.warning)(line)


def overrides_of(settings: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return settings as the texts KEY=VALUE that --set takes.

    Raises:
        InputError: a value cannot be written into a run file.
    """
    try:
        return tuple(f"{key}={_yaml(value)}" for key, value in (settings or {}).items())
    except (TypeError, ValueError) as error:
        raise InputError(f"settings: a value cannot be written into a run file: {error}") from None


def _yaml(value: Any) -> str:
    # A word stays as it is: the values of a sweep are parts of the names of its runs.
    if isinstance(value, str) and re.fullmatch(r"[\w.+-]+", value, re.ASCII) and parse_scalar(value) == value:
        return value
    return json.dumps(value)


def path_of(path: AnyPath | None) -> Path | None:
    """Return the path as an object; None stays None."""
    return None if path is None else Path(path)


def folder_of(run: LoadedRun | AnyPath) -> Path:
    """Return the folder of a run.

    Args:
        run: the run, its folder, its name or a job's id.

    Raises:
        InputError: there is no such run.
        UntrustedError: the folder belongs to another user, or others can write to it.
        FileError: the folder's run.yaml is wrong.
    """
    return run.folder if isinstance(run, LoadedRun) else load_run(run).folder


def check_count(name: str, count: int | None) -> None:
    """Check that a number is at least 1, or None.

    Args:
        name: function and argument, for the message.

    Raises:
        InputError: the number is below 1.
    """
    if count is not None and count < 1:
        raise InputError(f"{name}: found {count}; allowed: 1 or more")


def check_outside_of_jobs(function: str) -> None:
    """Check that this process is no part of a Slurm job, where a new run would take the job's nodes.

    Args:
        function: name of the function that queues runs, for the message.

    Raises:
        RefusedError: this process is part of a Slurm job.
    """
    if inside := os.environ.get("SLURM_JOB_ID"):
        raise RefusedError(
            f"{function}: this process is inside of job {inside}, and a run that starts there takes its nodes; use the "
            "command `hpctrain submit` for that, or remove SLURM_JOB_ID from os.environ to queue a job of its own"
        )
