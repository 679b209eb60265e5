"""Prints the JSON reply of a command of `hpctrain.worker` on stdout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from hpctrain.model.imported.user_error import outcome


def json_reply(make: Callable[[], dict[str, Any]]) -> int:
    """Print what `make` returns as JSON on stdout, or {"error": message} if it raises. Return 0, or the exit code of
    the error."""
    # The user's code may print. The reply goes to a private copy of stdout, and what that code prints goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with out:
        code, text = outcome(lambda: json.dumps(make(), allow_nan=False))
        out.write(json.dumps({"error": text}) if code else text)
    return code
