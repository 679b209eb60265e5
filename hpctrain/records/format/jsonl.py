"""Reads JSON-lines files of this user, to which processes append while others read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpctrain.base.errors import FieldError, FileError
from hpctrain.base.json_text import JsonError, parse_json
from hpctrain.base.owned_files import open_owned
from hpctrain.base.regular_file import open_regular

FILE_BYTES = 2 * 2**30
"""Largest JSON-lines file that is read, in bytes; enough for years of training steps."""
LINE_BYTES = 16 * 2**20
"""Longest line that is read, in bytes; a row of metrics for ten thousand ranks has a tenth of that."""


def read_jsonl(path: Path, *, owned: bool = True) -> list[dict[str, Any]]:
    """Return the JSON object of each line; an empty list where the file does not exist.

    Lines that are no whole JSON object are left out: their writer was killed while it wrote.

    Args:
        owned: require that the file and its folder belong to this user.

    Raises:
        UntrustedError: with `owned`, the file or its folder belongs to somebody else, or others can write to it.
        FileError: the file cannot be read, or is larger than FILE_BYTES.
    """
    try:
        descriptor = open_owned(path) if owned else open_regular(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FileError(path, [FieldError("", f"cannot read: {error.strerror}")]) from None
    values = []
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > FILE_BYTES:
            raise FileError(
                path, [FieldError("", f"has {size} bytes, expected at most {FILE_BYTES}; look at what it is")]
            )
        while line := file.readline(LINE_BYTES):
            value = parse_json_line(line)
            if value is not None:
                values.append(value)
    return values


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None where there is none."""
    try:
        value = parse_json(line.decode("utf-8", "replace"))
    except JsonError:
        return None
    return value if isinstance(value, dict) else None
