"""Describes an error of the user's own code in one line: its text, and the line of their code that raised it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch

import hpctrain

TEXT_LIMIT = 300
"""Most characters of an error's text that are shown."""

_OWN = f"{Path(hpctrain.__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_STDLIB = f"{sysconfig.get_paths()['stdlib']}/"
_INSTALLED = ("/site-packages/", "/dist-packages/")


def describe_user_error(error: BaseException) -> str:
    """The error's class and text, and the line of the user's code that raised it or led to it."""
    frame = _frame(error)
    place = f" (line {frame.lineno} of {frame.filename}: {frame.line})" if frame else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:TEXT_LIMIT]}{place}" if text else f"{type(error).__name__}{place}"


def _frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of code that is not an installed package; else the innermost outside of torch, Python and
    hpctrain; else None."""
    frames = traceback.extract_tb(error.__traceback__)
    called = [frame for frame in frames if not frame.filename.startswith((_OWN, _TORCH, _STDLIB, "<"))]
    written = [frame for frame in called if not any(part in frame.filename for part in _INSTALLED)]
    return next((group[-1] for group in (written, called) if group), None)
