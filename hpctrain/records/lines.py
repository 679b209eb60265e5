"""JSON-lines files of this user's own that are appended to while others read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.base.owned import read_owned


def read_lines(path: Path) -> list[Any]:
    """The JSON value of each line; a file that is not there has none.

    Lines that are not whole JSON are left out: a writer was killed in the middle of one.

    Raises:
        UntrustedError: the file or its folder is somebody else's, or others can write to it.
        FileError: it is too large to be one of hpctrain's.
    """
    try:
        text = read_owned(path).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    values = []
    for line in text.splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return values
