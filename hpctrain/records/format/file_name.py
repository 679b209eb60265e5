"""Types for file names inside files: a plain name, or a path below a folder that is made of plain names."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from hpctrain.base.errors import FieldError, FileError
from hpctrain.records.format.document import Part

NAME_BYTES_MAX = 255
"""Bytes of one name, on every file system of Linux (NAME_MAX)."""
PATH_BYTES_MAX = 4095
"""Bytes of a path (PATH_MAX, without the NUL at its end)."""
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")
"""Categories of Unicode that end lines or control terminals; other rare characters, as a no-break space, are in use."""


def plain_file_name(name: str) -> str:
    """Return the name, if it can only name a file directly in the folder that it is used in.

    Raises:
        ValueError: the name has a separator or a character that is not printed, begins with a dot, or is too long.
    """
    if name.startswith("."):
        raise ValueError("a file's plain name is expected; it may not begin with a dot")
    if not name or "/" in name or "\\" in name:
        raise ValueError("a file's plain name is expected, without a folder")
    strange = next((character for character in name if not character.isprintable()), None)
    if strange is not None:
        raise ValueError(f"a name of a file may not hold the character U+{ord(strange):04X}")
    if len(name.encode()) > NAME_BYTES_MAX:
        raise ValueError(f"a file's name has at most {NAME_BYTES_MAX} bytes")
    return name


def plain_name_in(file: Path, field: str, name: object, remedy: str) -> str:
    """Return the plain name of a file that a field of another program's file has.

    Raises:
        FileError: the name leads out of the file's folder, or is not a name; `remedy` says what to do.
    """
    try:
        if isinstance(name, str):
            return plain_file_name(name)
        text = "a file's plain name is expected"
    except ValueError as error:
        text = str(error)
    raise FileError(file, [FieldError(field, f"found {name!r:.80}; {text}; {remedy}")])


def checkpoint_name(name: str) -> str:
    """Return the name as `plain_file_name` does, or torch's `.metadata`, the only name with a dot in a checkpoint.

    Raises:
        ValueError: as for `plain_file_name`.
    """
    return name if name == ".metadata" else plain_file_name(name)


def path_below(path: str) -> str:
    """Return the path, if it is made of plain names: 'checkpoints/step-00000010'.

    Raises:
        ValueError: a part of the path is no plain name.
    """
    for part in path.split("/"):
        plain_file_name(part)
    return path


def any_path(path: str) -> str:
    """Return the path, if a file can have it; it may lead anywhere.

    Raises:
        ValueError: the path has a NUL or another character that ends lines or controls terminals, or is too long.
    """
    strange = next((character for character in path if unicodedata.category(character) in _CONTROLS), None)
    if strange is not None:
        raise ValueError(f"a path may not hold the character U+{ord(strange):04X}")
    if len(path.encode()) > PATH_BYTES_MAX or any(len(part.encode()) > NAME_BYTES_MAX for part in path.split("/")):
        raise ValueError(f"a path has at most {PATH_BYTES_MAX} bytes, and {NAME_BYTES_MAX} in each name")
    return path


class _FromFile(str):
    """A path that a user gives in a file; if it is relative, it counts from the file's folder."""


def with_absolute_paths(value: Any, base: Path) -> Any:
    """Return a file's model, or a value in it, with every `PathFromFile` resolved from the file's folder `base`."""
    match value:
        case _FromFile():
            return resolved_path(value, base)
        case list():
            return [with_absolute_paths(item, base) for item in value]
        case dict():
            return {key: with_absolute_paths(item, base) for key, item in value.items()}
        case Part():
            given = {name: with_absolute_paths(getattr(value, name), base) for name in value.model_fields_set}
            return value.model_copy(update=given)
    return value


def resolved_path(path: str, base: Path) -> str:
    """Return a path that a user gives, absolute: from the folder `base`, with `~` expanded."""
    return str(base / Path(path).expanduser())


PlainName = Annotated[str, AfterValidator(plain_file_name)]
"""Name of a file in the same folder as the file that contains the name."""
CheckpointName = Annotated[str, AfterValidator(checkpoint_name)]
"""Name of a file in a checkpoint's folder."""
PathBelow = Annotated[str, AfterValidator(path_below)]
"""Path of a file below a folder, made of plain names."""
AnyPath = Annotated[str, AfterValidator(any_path)]
"""Path that a user gives."""
PathFromFile = Annotated[AnyPath, AfterValidator(_FromFile)]
"""Path that a user gives in a file; `with_absolute_paths` resolves it from the file's folder."""
OptionalPath = Annotated[PathFromFile | None, BeforeValidator(lambda value: None if value == "" else value)]
"""Such a path, or None; an empty text is None."""
