"""Records that cannot be used: either an error with their place, or counted and listed."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.corpus.input.skipped import LISTED_IN_UNIT, SkippedInput

RECORD_BYTES = 64 * 1024 * 1024
"""Largest record. A longer one is a mistake (a file without line ends), and would take all the memory."""


class BadRecords:
    """Counts and lists what is skipped; raises at the first bad record where nothing may be skipped."""

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.count = 0
        """Number of skipped records, plus one for each damaged file."""
        self.damaged: list[SkippedInput] = []
        """Damaged files, whose content after the damage is lost."""
        self._listed: list[SkippedInput] = []

    @property
    def listed(self) -> list[SkippedInput]:
        """The first skipped inputs; damaged files come first."""
        return [*self.damaged, *self._listed][:LISTED_IN_UNIT]

    def add_bad(self, path: Path, reason: str, unit: str = "", number: int = 0) -> None:
        """Count a bad record of a file: its line, row or document of that number.

        Raises:
            InputError: nothing may be skipped.
        """
        entry = self._skipped_input(path, reason, unit, number)
        if len(self._listed) < LISTED_IN_UNIT:
            self._listed.append(entry)

    def add_damage(self, path: Path, reason: str, unit: str = "", number: int = 0) -> None:
        """Count a file that is damaged from that line or row on.

        Raises:
            InputError: nothing may be skipped.
        """
        self.damaged.append(self._skipped_input(path, reason, unit, number))

    def _skipped_input(self, path: Path, reason: str, unit: str, number: int) -> SkippedInput:
        entry = SkippedInput(str(path), reason, unit, number)
        if not self._skip:
            raise InputError(f"{entry}; mend it, or leave such records out with --skip-bad")
        self.count += 1
        return entry
