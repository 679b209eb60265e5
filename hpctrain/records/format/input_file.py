"""Opens files that users give: only regular files of a bounded size, and every failure is a FileError."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.base.errors import FieldError, FileError
from hpctrain.base.owned_files import read_owned
from hpctrain.base.regular_file import open_regular, read_regular

DOCUMENT_BYTES = 64 * 2**20
"""Largest file that is read into memory as a whole, in bytes; a topology of a thousand nodes has a tenth of that."""


def read_input(
    path: Path, limit_bytes: int = DOCUMENT_BYTES, missing: str = "no such file", *, owned: bool = False
) -> bytes:
    """Return all bytes of a file; it may be reached by a symbolic link, except with `owned`.

    Args:
        missing: message for a file that does not exist.
        owned: require that the file and its folder belong to this user.

    Raises:
        FileError: the file is missing, unreadable, larger than `limit_bytes`, or a folder, FIFO or device.
        UntrustedError: with `owned`, the file belongs to somebody else, or others can write to it.
    """
    try:
        return read_owned(path, limit_bytes) if owned else read_regular(os.path.realpath(path), limit_bytes)
    except (FileError, OSError, ValueError) as error:
        raise _as_file_error(path, error, missing) from None


def read_input_text(
    path: Path, limit_bytes: int = DOCUMENT_BYTES, missing: str = "no such file", *, owned: bool = False
) -> str:
    """Return the text of a UTF-8 file, read as by `read_input`.

    Raises:
        FileError, UntrustedError: as for `read_input`, or the file is no text.
    """
    try:
        return read_input(path, limit_bytes, missing, owned=owned).decode()
    except UnicodeDecodeError:
        raise FileError(path, [FieldError("", "not a text file in UTF-8")]) from None


def open_input(path: Path) -> int:
    """Return a descriptor for reading a regular file of any size, which may be reached by a symbolic link.

    Raises:
        FileError: the file is missing, unreadable, or a folder, FIFO or device.
    """
    try:
        return open_regular(os.path.realpath(path))
    except (FileError, OSError, ValueError) as error:
        raise _as_file_error(path, error, "no such file") from None


def _as_file_error(path: Path, error: Exception, missing: str) -> FileError:
    """Return the error as a FileError about the path that the user gave."""
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
