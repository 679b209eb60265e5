"""Names of files that stand in a file: each is one plain name, or a path below a folder made of such."""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator

NAME_BYTES_MAX = 255
"""Of one name on every file system of Linux (NAME_MAX)."""
PATH_BYTES_MAX = 4095
"""Of a path (PATH_MAX, without the NUL at its end)."""
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")
"""Categories of Unicode that end lines or steer terminals; other rare characters, as a no-break space, are in use."""


def plain_file_name(name: str) -> str:
    """The name itself, if it can only name a file within the folder that it is used in.

    Raises:
        ValueError: it has a separator, a character that is not printed, a dot at its beginning, or is too long.
    """
    if name.startswith("."):
        raise ValueError("a file's plain name is expected; it may not begin with a dot")
    return _within_folder(name)


def checkpoint_name(name: str) -> str:
    """As `plain_file_name`; torch's own `.metadata` is the one name with a dot that a checkpoint has.

    Raises:
        ValueError: as `plain_file_name`.
    """
    return name if name == ".metadata" else plain_file_name(name)


def path_below(path: str) -> str:
    """The path itself, if it is made of plain names: 'checkpoints/step-00000010'.

    Raises:
        ValueError: one of its parts is no plain name.
    """
    for part in path.split("/"):
        plain_file_name(part)
    return path


def any_path(path: str) -> str:
    """The path itself, if a file can have it; it may lead anywhere.

    Raises:
        ValueError: it has a NUL or another character that ends lines or steers terminals, or is too long.
    """
    strange = next((character for character in path if unicodedata.category(character) in _CONTROLS), None)
    if strange is not None:
        raise ValueError(f"a path may not hold the character U+{ord(strange):04X}")
    if len(path.encode()) > PATH_BYTES_MAX or any(len(part.encode()) > NAME_BYTES_MAX for part in path.split("/")):
        raise ValueError(f"a path has at most {PATH_BYTES_MAX} bytes, and {NAME_BYTES_MAX} in each name")
    return path


PlainName = Annotated[str, AfterValidator(plain_file_name)]
"""Name of a file in the folder of the file that it stands in."""
CheckpointName = Annotated[str, AfterValidator(checkpoint_name)]
"""Name of a file in a checkpoint's folder."""
PathBelow = Annotated[str, AfterValidator(path_below)]
"""Path of a file below a folder, of plain names."""
AnyPath = Annotated[str, AfterValidator(any_path)]
"""Path that a person gives."""


def _within_folder(name: str) -> str:
    if not name or "/" in name or "\\" in name:
        raise ValueError("a file's plain name is expected, without a folder")
    _check_characters(name)
    if len(name.encode()) > NAME_BYTES_MAX:
        raise ValueError(f"a file's name has at most {NAME_BYTES_MAX} bytes")
    return name


def _check_characters(text: str) -> None:
    strange = next((character for character in text if not character.isprintable()), None)
    if strange is not None:
        raise ValueError(f"a name of a file may not hold the character U+{ord(strange):04X}")
