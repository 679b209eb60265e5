"""The error tree. Each class carries the exit code that the command line returns for it.

    HpctrainError                 1  the work failed
    ├── InputError                2  what the person gave cannot be used (a typo, a missing folder, a run in use)
    │   ├── FileError             2  a file is invalid; every mistake in it is listed with its line
    │   └── UntrustedError        2  a file or folder that others own or can write to; none of it was used
    ├── RefusedError              4  understood, and declined (cannot fit, topology of other nodes, failed probe)
    ├── NoProgressError          77  several generations in a row failed without progress
    ├── CommandError              1  a command that hpctrain ran failed
    │   └── CommandTimeoutError   1  a command gave no answer in time and was ended
    ├── StorageError              1  a file cannot be written (disk full, permission)
    ├── WaitTimeoutError          1  a run was still going on when the time to wait for it was over
    ├── Superseded                1  a worker of a past generation was about to write
    └── CheckpointError           1  a checkpoint cannot be used; the caller tries the previous one
        └── DamagedCheckpointError 1  a file of it is not what was written

The text of an error is for the person at the terminal: the value found, what is allowed, what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

EXIT_DONE = 0
"""Done. Of `probe`: the verdict is go. Of a worker or an agent: all steps are done."""
EXIT_FAILED = 1
"""The command failed. Of a worker or an agent: its own error."""
EXIT_USAGE = 2
"""Wrong usage or invalid input; nothing was started."""
EXIT_WARNINGS = 3
"""Warnings, of `probe`, `doctor` and `image check`."""
EXIT_REFUSED = 4
"""The request is valid and was refused. Of a worker, an agent or a job: no plan fits, the probe refuses the nodes, or
all checkpoints are lost."""
EXIT_RESUMABLE = 75
"""Only of workers, agents and jobs: stopped at a checkpoint, or too few nodes are left; the next attempt continues the
run."""
EXIT_INFRASTRUCTURE = 76
"""Only of workers, agents and jobs: a node, a device, a peer or the network failed. Of a worker also: the checkpoint
that it was to load is damaged, or the state in memory cannot be used; the next generation starts from another one."""
EXIT_NO_PROGRESS = 77
"""Only of workers, agents and jobs: several generations or attempts in a row ended without a new checkpoint."""
EXIT_NEW_PLAN = 78
"""Only of workers: they stopped after a step, so that the next generation runs another plan."""

LINES_MAX = 50
"""Most mistakes of one file that an error lists; further mistakes are only counted."""
TEXT_MAX = 1000
"""Most characters that an error shows of the text about one mistake."""


class HpctrainError(Exception):
    """The work failed. Base of every error that hpctrain raises on purpose."""

    exit_code: ClassVar[int] = EXIT_FAILED


class InputError(HpctrainError):
    """The person's input cannot be used; nothing was started."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class FieldError:
    """One mistake in a file: the key (`field`; empty for the whole file), the value found and what is allowed (`text`),
    and the line number where it is known."""

    field: str
    text: str
    line: int | None = None


class FileError(InputError):
    """A file is missing, unreadable or has mistakes; the text lists up to LINES_MAX mistakes, a line each."""

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
    """Return text from a file as part of one line: cut to `longest` characters, with characters escaped that end the
    line or steer a terminal."""
    text = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class UntrustedError(InputError):
    """A file or folder belongs to another user, others can write to it, or it is not of the expected kind, such as a
    symbolic link; none of it was used."""

    def __init__(self, path: Path | str, reason: str, remedy: str) -> None:
        self.path = str(path)
        self.reason = reason
        """Why the file is not trusted, as the end of a sentence that begins with its path."""
        self.remedy = remedy
        super().__init__(f"{path}: {reason}; {remedy}")

    def __reduce__(self) -> tuple[type[UntrustedError], tuple[str, str, str]]:
        """Return the class and the constructor's arguments, from which pickle makes a copy. By default, pickle would
        pass the error's text as the only argument."""
        return UntrustedError, (self.path, self.reason, self.remedy)


class RefusedError(HpctrainError):
    """The request was understood and is declined, with the reason and the next thing to do."""

    exit_code = EXIT_REFUSED


class NoProgressError(HpctrainError):
    """Several generations in a row failed without a new checkpoint or a later step in memory."""

    exit_code = EXIT_NO_PROGRESS


class CommandError(HpctrainError):
    """A command that hpctrain ran could not start or ended with an error."""


class CommandTimeoutError(CommandError):
    """A command did not end in time and was killed; it may still have done its work."""


class StorageError(HpctrainError):
    """Data could not be written, for example because the disk is full, or a file of a run could not be read, because
    its file system fails. Existing files stay usable."""


class WaitTimeoutError(HpctrainError, TimeoutError):
    """A run was still going on when the time to wait for it was over; nothing was done to the run."""


class Superseded(HpctrainError):
    """A newer generation or attempt has begun, so a process of an earlier one must write nothing."""


class CheckpointError(HpctrainError):
    """A checkpoint cannot be used; the previous checkpoint may be good."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or was changed after it was written."""
