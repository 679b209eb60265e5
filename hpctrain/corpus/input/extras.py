"""Libraries of the extra `data`, which not everybody needs: asked for by what they are needed for."""

from __future__ import annotations

import importlib.util

from hpctrain.base.errors import InputError


def require_library(module: str, purpose: str) -> None:
    """Make sure that a library is there, before any work is done.

    Raises:
        InputError: it is not, with what installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{purpose}: needs {module}, which is not installed; run `pip install 'hpctrain[data]'`")
