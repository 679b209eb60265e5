"""Describes an error of the user's code in one line, finds the kind of code that raised an error, and gives an error's
exit code."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import torch

import hpctrain
from hpctrain.base.errors import HpctrainError

Result = TypeVar("Result")

TEXT_LIMIT = 300
"""Largest number of characters of an error's text that are shown."""

Origin = Literal["user", "package", "hpctrain", "torch", "python"]
"""Whose code a stack frame runs: the user's, an installed package's, hpctrain's, torch's or Python's own."""

_HPCTRAIN = f"{Path(hpctrain.__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_STDLIB = f"{sysconfig.get_paths()['stdlib']}/"


def describe_user_error(error: BaseException) -> str:
    """Return one line with an error's class, its text, and the line of the user's code (or else of a package) that
    raised it or led to it.
    """
    frame = innermost_frame(error, "user") or innermost_frame(error, "package")
    place = f" (line {frame.lineno} of {frame.filename}: {frame.line})" if frame else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:TEXT_LIMIT]}{place}" if text else f"{type(error).__name__}{place}"


def outcome(make: Callable[[], Result]) -> tuple[int, Result | str]:
    """Return (0, what `make` returns), or (exit code, message of the error) if it raises one. The traceback of an error
    that is not hpctrain's own is printed on stderr."""
    try:
        return 0, make()
    except HpctrainError as error:
        return error.exit_code, str(error)
    except Exception as error:  # mostly from the user's model: the traceback shows where
        traceback.print_exc()
        return HpctrainError.exit_code, describe_user_error(error)


def innermost_frame(error: BaseException, *origins: Origin) -> traceback.FrameSummary | None:
    """Return the innermost stack frame of an error in code of the given origins (without any: of all origins); None if
    there is none.
    """
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((frame for frame in frames if not origins or _origin(frame.filename) in origins), None)


def raised_in(error: BaseException) -> Origin | None:
    """Return whose code raised an error, such as 'user' or 'torch'; None for an error that was never raised."""
    frame = innermost_frame(error)
    return None if frame is None else _origin(frame.filename)


def _origin(path: str) -> Origin:
    if path.startswith(_HPCTRAIN):
        return "hpctrain"
    if path.startswith(_TORCH):
        return "torch"
    if "/site-packages/" in path or "/dist-packages/" in path:
        return "package"
    return "python" if path.startswith(("<", _STDLIB)) else "user"
