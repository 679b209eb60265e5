"""Reads files that users give, and files of JSON lines. Only regular files are opened, and a function that reads a file
reads only a bounded number of bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpctrain.base.errors import FieldError, FileError
from hpctrain.base.json_text import JsonError, parse_json
from hpctrain.base.owned_files import open_owned, read_owned
from hpctrain.base.regular_file import open_regular, read_regular

DOCUMENT_BYTES = 64 * 2**20
"""Largest file that is read into memory as a whole, in bytes; the topology of a thousand nodes has a tenth of that."""


def read_input(
    path: Path, limit_bytes: int = DOCUMENT_BYTES, missing: str = "no such file", *, owned: bool = False
) -> bytes:
    """Return all bytes of the file at `path`, which may be a symbolic link, except with `owned`.

    Args:
        limit_bytes: largest size of the file.
        missing: message of the error for a file that does not exist.
        owned: require that the file and its folder belong to this user and that nobody else can write to them, as in a
            run folder.

    Raises:
        FileError: the file is missing, unreadable, larger than `limit_bytes`, or a folder, FIFO or device. Its cause is
            the OSError, if there is one.
        UntrustedError: with `owned`, the file or its folder belongs to somebody else, or others can write to one of
            them, or the file is not regular.
    """
    try:
        return read_owned(path, limit_bytes) if owned else read_regular(os.path.realpath(path), limit_bytes)
    except (FileError, OSError, ValueError) as error:
        raise _as_file_error(path, error, missing) from error


def read_input_text(
    path: Path, limit_bytes: int = DOCUMENT_BYTES, missing: str = "no such file", *, owned: bool = False
) -> str:
    """Return the text of the UTF-8 file at `path`; the arguments are those of `read_input`.

    Raises:
        FileError: the file is missing, unreadable, too large, no regular file, or not UTF-8.
        UntrustedError: with `owned`, the file or its folder belongs to somebody else, or others can write to one of
            them, or the file is not regular.
    """
    try:
        return read_input(path, limit_bytes, missing, owned=owned).decode()
    except UnicodeDecodeError:
        raise FileError(path, [FieldError("", "not a text file in UTF-8")]) from None


def open_input(path: Path) -> int:
    """Return a file descriptor for reading the regular file at `path`, of any size; `path` may be a symbolic link.

    Raises:
        FileError: the file is missing, unreadable, or a folder, FIFO or device.
    """
    try:
        return open_regular(os.path.realpath(path))
    except (FileError, OSError, ValueError) as error:
        raise _as_file_error(path, error, "no such file") from None


def _as_file_error(path: Path, error: Exception, missing: str) -> FileError:
    """Return `error` as a FileError about `path`, the path that the user gave. `missing` is the message if the file
    does not exist."""
    match error:
        case FileError():
            return FileError(path, error.mistakes)
        case FileNotFoundError():
            text = missing
        case OSError():
            text = f"cannot read: {error.strerror}"
        case _:
            text = "no name of a file; it holds a NUL"
    return FileError(path, [FieldError("", text)])


FILE_BYTES = 2 * 2**30
"""Largest file of JSON lines that is read, in bytes; metrics.jsonl of years of training is smaller."""
LINE_BYTES = 16 * 2**20
"""Longest JSON line that is read, in bytes; a row of metrics for ten thousand ranks has a tenth of that."""


def read_jsonl(path: Path, *, owned: bool = True) -> list[dict[str, Any]]:
    """Return the JSON object of each line, in file order; an empty list if the file does not exist.

    Lines that are longer than LINE_BYTES or no complete JSON object are left out: the writer of such a line may have
    been killed while it wrote.

    Args:
        owned: require that the file and its folder belong to this user and that nobody else can write to them, as in a
            run folder.

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


def read_jsonl_tail(path: Path, limit_bytes: int, lines: int | None = None) -> list[dict[str, Any]]:
    """Return the JSON objects of the lines in the last `limit_bytes` of a file of this user, in order. A line that is
    no JSON object, because it was cut off, is left out.

    Args:
        lines: most lines that are read, counted from the end; None: all in these bytes.

    Raises:
        OSError: the file cannot be opened.
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    with os.fdopen(open_owned(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit_bytes))
        tail = file.read(limit_bytes).splitlines()
    objects = map(parse_json_line, tail if lines is None else tail[-lines:])
    return [entry for entry in objects if entry is not None]


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if the line is not a complete JSON object."""
    try:
        value = parse_json(line.decode("utf-8", "replace"))
    except JsonError:
        return None
    return value if isinstance(value, dict) else None
