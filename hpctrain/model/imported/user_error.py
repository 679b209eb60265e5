"""An error of a person's own code in one line: what it says, and where in their code it was raised."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch

import hpctrain

TEXT_LIMIT = 300
"""Characters of an error's text that one line has room for."""

_OWN = f"{Path(hpctrain.__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_STDLIB = f"{sysconfig.get_paths()['stdlib']}/"
_INSTALLED = ("/site-packages/", "/dist-packages/")


def describe_user_error(error: BaseException) -> str:
    """The error's kind and text, and the line of the person's code that raised it or called what did."""
    frame = _frame(error)
    place = f" (line {frame.lineno} of {frame.filename}: {frame.line})" if frame else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:TEXT_LIMIT]}{place}" if text else f"{type(error).__name__}{place}"


def _frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of code that was not installed, else of any but torch, Python and hpctrain; None without."""
    frames = traceback.extract_tb(error.__traceback__)
    called = [frame for frame in frames if not frame.filename.startswith((_OWN, _TORCH, _STDLIB, "<"))]
    written = [frame for frame in called if not any(part in frame.filename for part in _INSTALLED)]
    return next((group[-1] for group in (written, called) if group), None)
