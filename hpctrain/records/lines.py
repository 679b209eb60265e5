"""JSON-lines files that are appended to while others read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[Any]:
    """The JSON value of each line; a file that is not there has none.

    Lines that are not whole JSON are left out: a writer was killed in the middle of one.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    values = []
    for line in text.splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return values
