"""Describes the crash of an agent in one sentence, for the other agents, the events and the user."""

from __future__ import annotations

import traceback
from pathlib import Path

from hpctrain.base.errors import HpctrainError


def crash_message(node: str, error: Exception) -> str:
    """Return a sentence that says what ended the agent of a node. The whole traceback is in the agent's log."""
    if isinstance(error, HpctrainError):
        return f"the agent of {node} ended by an error: {error}"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"the agent of {node} crashed: {what}{at}"
