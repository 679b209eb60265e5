"""Types for the file names and paths that files contain: a plain name, a path of plain names below a folder, or any
path that a user gives."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from hpctrain.base.errors import FieldError, FileError
from hpctrain.records.format.document import Part

NAME_BYTES_MAX = 255
"""Most bytes of one file name on Linux (NAME_MAX)."""
PATH_BYTES_MAX = 4095
"""Most bytes of a path on Linux (PATH_MAX, without the NUL at its end)."""
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories of characters that a path may not contain, because they end lines, control terminals or are half
of a surrogate pair. Other rare characters are allowed, because names with them exist, such as the no-break space."""


def plain_file_name(name: str) -> str:
    """Return `name` unchanged, after checking that it names a file directly in the folder in which it is used.

    Raises:
        ValueError: the name is empty, has a separator or a character that is not printed, begins with a dot, or is too
            long.
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
    """Return `name` unchanged, after checking that it is a plain file name. It was read from `field` of `file`, which
    another program wrote.

    Raises:
        FileError: the name leads out of the folder of `file`, or is not a name. The message ends with `remedy`, which
            says what to do.
    """
    try:
        if isinstance(name, str):
            return plain_file_name(name)
        text = "a file's plain name is expected"
    except ValueError as error:
        text = str(error)
    raise FileError(file, [FieldError(field, f"found {name!r:.80}; {text}; {remedy}")])


def checkpoint_name(name: str) -> str:
    """Return `name` unchanged, after checking that it is a plain file name, or `.metadata`. torch gives this name to a
    file in a checkpoint; no other name in a checkpoint begins with a dot.

    Raises:
        ValueError: the name is neither.
    """
    return name if name == ".metadata" else plain_file_name(name)


def path_below(path: str) -> str:
    """Return `path` unchanged, after checking that it consists of plain names: 'checkpoints/step-00000010'.

    Raises:
        ValueError: a part of the path is no plain name.
    """
    for part in path.split("/"):
        plain_file_name(part)
    return path


def any_path(path: str) -> str:
    """Return `path` unchanged, after checking that a file can have such a path; it may lead anywhere.

    Raises:
        ValueError: the path has a NUL or another character that ends lines, controls terminals or is half of a
            surrogate pair, or the path or a name in it is too long.
    """
    strange = next((character for character in path if unicodedata.category(character) in _CONTROLS), None)
    if strange is not None:
        raise ValueError(f"a path may not hold the character U+{ord(strange):04X}")
    if len(path.encode()) > PATH_BYTES_MAX or any(len(part.encode()) > NAME_BYTES_MAX for part in path.split("/")):
        raise ValueError(f"a path has at most {PATH_BYTES_MAX} bytes, and {NAME_BYTES_MAX} in each name")
    return path


class _FromFile(str):
    """A path that a user gives in a file. If the path is relative, it is relative to the folder of that file."""


def with_absolute_paths(value: Any, base: Path) -> Any:
    """Return `value`, a file's model or a value in it, with every `PathFromFile` made absolute. `base` is the folder of
    the file, from which relative paths are resolved."""
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
    """Return the absolute path for a path that a user gives: `~` is expanded, and a relative path is resolved from the
    folder `base`."""
    return str(base / Path(path).expanduser())


PlainName = Annotated[str, AfterValidator(plain_file_name)]
"""Name of a file in the same folder as the file that contains the name."""
CheckpointName = Annotated[str, AfterValidator(checkpoint_name)]
"""Name of a file in a checkpoint's folder."""
PathBelow = Annotated[str, AfterValidator(path_below)]
"""Path of a file or folder below a known folder, made of plain names."""
AnyPath = Annotated[str, AfterValidator(any_path)]
"""Path that a user gives; it may lead anywhere."""
PathFromFile = Annotated[AnyPath, AfterValidator(_FromFile)]
"""Path that a user gives in a file; `with_absolute_paths` resolves it from the file's folder."""
OptionalPath = Annotated[PathFromFile | None, BeforeValidator(lambda value: None if value == "" else value)]
"""Path that a user gives in a file, or None; an empty text is read as None."""
