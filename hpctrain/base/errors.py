"""The error tree. Each class carries the exit code that the command line returns for it.

    HpctrainError                 1  the work failed
    ├── InputError                2  what the person gave cannot be used (a typo, a missing folder, a run in use)
    │   ├── FileError             2  a file is invalid; every mistake in it is listed with its line
    │   └── UntrustedError        2  a file or folder that others own or can write to; nothing of it was believed
    ├── RefusedError                   4  understood, and declined (cannot fit, topology of other nodes, failed probe)
    ├── CommandError              1  a command that hpctrain ran failed
    │   └── CommandTimeoutError        1  a command gave no answer in time and was ended
    ├── StorageError              1  a file cannot be written (disk full, permission)
    ├── Superseded                1  a worker of a past generation was about to write
    └── CheckpointError           1  a checkpoint cannot be trusted; the caller tries the one before

The text of an error is for the person at the terminal: what was found, what is allowed, what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_WARNINGS = 3
EXIT_REFUSED = 4
EXIT_RESUMABLE = 75
"""Of agents, workers and the job: stopped at a checkpoint, and the next attempt goes on."""
EXIT_INFRASTRUCTURE = 76
"""A node, a device, a peer or the network failed."""
EXIT_NO_PROGRESS = 77
"""Generation after generation ended without a new checkpoint."""

LINES_MAX = 50
"""Mistakes of one file that are told; who has more begins with these."""
TEXT_MAX = 1000
"""Characters of what is told of one mistake."""


class HpctrainError(Exception):
    """The work failed. Base of every error that hpctrain raises on purpose."""

    exit_code: ClassVar[int] = EXIT_FAILED


class InputError(HpctrainError):
    """What the person gave cannot be used; nothing was started."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class FieldError:
    """One mistake in a file: where it is, what was found and what is allowed."""

    field: str
    text: str
    line: int | None = None


class FileError(InputError):
    """A file is missing, unreadable or has mistakes; all of them are told at once, a line each."""

    def __init__(self, path: Path | str, mistakes: Sequence[FieldError]) -> None:
        self.path = str(path)
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        lines = []
        for mistake in self.mistakes[:LINES_MAX]:
            place = f"{self.path}:{mistake.line}" if mistake.line else self.path
            field = f" {_shown(mistake.field)}:" if mistake.field else ""
            lines.append(f"{_shown(place, len(place))}:{field} {_shown(mistake.text, TEXT_MAX)}")
        more = len(self.mistakes) - LINES_MAX
        return [*lines, f"{_shown(self.path, len(self.path))}: {more} mistakes more"] if more > 0 else lines


def _shown(text: str, longest: int = 200) -> str:
    """A text out of a file as a part of one line: nothing in it ends the line, steers a terminal or fills it."""
    text = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class UntrustedError(InputError):
    """A file or folder is somebody else's, or others can write to it; nothing of it was believed."""

    def __init__(self, path: Path | str, reason: str, remedy: str) -> None:
        self.path = str(path)
        self.reason = reason
        """The end of a sentence that begins with the path."""
        self.remedy = remedy
        super().__init__(f"{path}: {reason}; {remedy}")

    def __reduce__(self) -> tuple[type[UntrustedError], tuple[str, str, str]]:
        """An exception is copied to another process by its arguments, not by its text."""
        return UntrustedError, (self.path, self.reason, self.remedy)


class RefusedError(HpctrainError):
    """The request was understood and is declined, with the reason and the next thing to do."""

    exit_code = EXIT_REFUSED


class CommandError(HpctrainError):
    """A command that hpctrain ran could not start or ended with an error."""


class CommandTimeoutError(CommandError):
    """A command gave no answer in time and was ended; what it was to do may have been done."""


class StorageError(HpctrainError):
    """A file could not be written; what was there before is unchanged."""


class Superseded(HpctrainError):
    """Another generation began: whoever still belongs to the one before writes nothing."""


class CheckpointError(HpctrainError):
    """A checkpoint is incomplete or not what was written; the one before it may be good."""
