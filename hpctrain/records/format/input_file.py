"""The door for files that people give: regular ones of a bounded size, and every failure is a FileError."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.base.errors import FieldError, FileError
from hpctrain.base.owned_files import read_owned
from hpctrain.base.regular_file import open_regular, read_regular

DOCUMENT_BYTES = 64 * 2**20
"""Most bytes of a file that is held in memory as a whole; a topology of a thousand nodes has a tenth of that."""


def read_input(
    path: Path, limit_bytes: int = DOCUMENT_BYTES, missing: str = "no such file", *, owned: bool = False
) -> bytes:
    """All bytes of a file, which may be reached by a symbolic link unless it has to be `owned`.

    Args:
        missing: what the person is told where there is none.
        owned: it is believed only if it is this user's, in a folder of this user's.

    Raises:
        FileError: it is missing, unreadable, larger, or a folder, FIFO or device.
        UntrustedError: it has to be this user's, and is somebody else's, or others can write to it.
    """
    try:
        return read_owned(path, limit_bytes) if owned else read_regular(os.path.realpath(path), limit_bytes)
    except (FileError, OSError, ValueError) as error:
        raise _as_file_error(path, error, missing) from None


def read_input_text(
    path: Path, limit_bytes: int = DOCUMENT_BYTES, missing: str = "no such file", *, owned: bool = False
) -> str:
    """As `read_input`, as text in UTF-8.

    Raises:
        FileError, UntrustedError: as `read_input`, or it is no text.
    """
    try:
        return read_input(path, limit_bytes, missing, owned=owned).decode()
    except UnicodeDecodeError:
        raise FileError(path, [FieldError("", "not a text file in UTF-8")]) from None


def open_input(path: Path, missing: str = "no such file") -> int:
    """A descriptor for reading a regular file of any size, which may be reached by a symbolic link.

    Raises:
        FileError: it is missing, unreadable, or a folder, FIFO or device.
    """
    try:
        return open_regular(os.path.realpath(path))
    except (FileError, OSError, ValueError) as error:
        raise _as_file_error(path, error, missing) from None


def _as_file_error(path: Path, error: Exception, missing: str) -> FileError:
    """The same error about the path that the person gave."""
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
