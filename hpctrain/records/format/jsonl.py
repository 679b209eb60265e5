"""JSON-lines files of this user's own that are appended to while others read them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpctrain.base.errors import FieldError, FileError
from hpctrain.base.owned_files import open_owned
from hpctrain.base.regular_file import open_regular
from hpctrain.records.format.json_text import JsonError, parse_json

FILE_BYTES = 2 * 2**30
"""Most bytes of a file of lines: steps of a run for years."""
LINE_BYTES = 16 * 2**20
"""Most bytes of a line; a row of ten thousand ranks has a tenth of that."""


def read_jsonl(path: Path, *, owned: bool = True) -> list[dict[str, Any]]:
    """The JSON object of each line; a file that is not there has none.

    Lines that are no whole JSON object are left out: a writer was killed in the middle of one.

    Args:
        owned: it is believed only if it is this user's, in a folder of this user's.

    Raises:
        UntrustedError: the file or its folder is somebody else's, or others can write to it.
        FileError: it cannot be read, or is larger than FILE_BYTES.
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
    """The JSON object in a line, or None where it holds none."""
    try:
        value = parse_json(line.decode("utf-8", "replace"))
    except JsonError:
        return None
    return value if isinstance(value, dict) else None
