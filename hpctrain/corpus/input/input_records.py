"""Records that cannot be used: told with their place, or listed and counted."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.corpus.input.skipped import LISTED_IN_UNIT, SkippedInput

RECORD_BYTES = 64 * 1024 * 1024
"""A longer record is no document but an accident (a file without line ends), and would take all the memory."""


class BadRecords:
    """Counts what is left out and lists the first of it; stops at the first where nothing may be."""

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.count = 0
        """What is left out: records, and the rest of each damaged file."""
        self.damaged: list[SkippedInput] = []
        """Files of which what follows is lost."""
        self._listed: list[SkippedInput] = []

    @property
    def listed(self) -> list[SkippedInput]:
        """The first of what is left out; what is lost of whole files comes first."""
        return [*self.damaged, *self._listed][:LISTED_IN_UNIT]

    def add_bad(self, path: Path, reason: str, unit: str = "", number: int = 0) -> None:
        """A record of a file, its line, row or document of that number, is of no use.

        Raises:
            InputError: nothing may be left out.
        """
        entry = self._left_out(path, reason, unit, number)
        if len(self._listed) < LISTED_IN_UNIT:
            self._listed.append(entry)

    def add_damage(self, path: Path, reason: str, unit: str = "", number: int = 0) -> None:
        """From that line or row on a file is damaged.

        Raises:
            InputError: nothing may be left out.
        """
        self.damaged.append(self._left_out(path, reason, unit, number))

    def _left_out(self, path: Path, reason: str, unit: str, number: int) -> SkippedInput:
        entry = SkippedInput(str(path), reason, unit, number)
        if not self._skip:
            raise InputError(f"{entry}; mend it, or leave such records out with --skip-bad")
        self.count += 1
        return entry
