"""Optional libraries of the extra `data`, required only by the features that need them."""

from __future__ import annotations

import importlib.util

from hpctrain.base.errors import InputError


def require_library(module: str, purpose: str) -> None:
    """Check before any work that an optional library is installed.

    Raises:
        InputError: it is missing; the message says how to install it.
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{purpose}: needs {module}, which is not installed; run `pip install 'hpctrain[data]'`")
