"""How a worker's verb answers on stdout in JSON what it was asked on the command line."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

from hpctrain.base.errors import HpctrainError
from hpctrain.model.imported.user_error import describe_user_error


def json_reply(make: Callable[[], dict[str, Any]]) -> int:
    """Print what `make` gives, or {"error": …} for an error that is a person's to mend; its exit code."""
    # Code of other people may print: the answer goes where they cannot reach, and what they say to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with out:
        try:
            json.dump(make(), out, allow_nan=False)
        except HpctrainError as error:
            json.dump({"error": str(error)}, out)
            return error.exit_code
        except Exception as error:  # of a person's model, most of all: they want to see where
            traceback.print_exc()
            json.dump({"error": describe_user_error(error)}, out)
            return HpctrainError.exit_code
    return 0
