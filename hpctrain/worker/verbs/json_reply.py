"""Prints the JSON reply of a command of `hpctrain.worker` on stdout."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

from hpctrain.base.errors import HpctrainError
from hpctrain.model.imported.user_error import describe_user_error


def json_reply(make: Callable[[], dict[str, Any]]) -> int:
    """Print what `make` returns as JSON on stdout, or {"error": message} if it raises. Return 0, or the exit code of
    the error."""
    # The user's code may print. The reply goes to a private copy of stdout, and what that code prints goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with out:
        try:
            json.dump(make(), out, allow_nan=False)
        except HpctrainError as error:
            json.dump({"error": str(error)}, out)
            return error.exit_code
        except Exception as error:  # mostly from the user's model: the traceback shows where
            traceback.print_exc()
            json.dump({"error": describe_user_error(error)}, out)
            return HpctrainError.exit_code
    return 0
