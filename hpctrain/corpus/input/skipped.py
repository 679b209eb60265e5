"""The skipped input of a corpus: files and records with the reason, listed in a file in the corpus folder.

skipped.jsonl: a first line {"skipped": how many, "listed": how many follow}, then {"file", "line" (or "row" or
"document"), "reason"} for each. The file exists only if something was skipped.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.errors import InputError

SKIPPED_NAME = "skipped.jsonl"
"""Name of the list within a corpus folder."""
LISTED_IN_UNIT = 1000
"""Most skipped files and records that a work unit lists; more are only counted."""
LISTED_BYTES = 4 * 1024 * 1024
"""Most bytes of a list on disk and in memory; further entries are only counted."""
UNITS = ("line", "row", "document")
"""What the number of an entry can count."""
_REASON_LIMIT = 300
"""Most characters of a reason."""


@dataclass(frozen=True)
class SkippedInput:
    """A file or a record that was skipped."""

    file: str
    reason: str
    unit: str = ""
    """One of `UNITS`; '' for the whole file."""
    number: int = 0
    """Number of the line, row or document; the first is 1."""

    def __str__(self) -> str:
        """Return 'file:line: reason', 'file: row 3: reason', or 'file: reason'."""
        place = f":{self.number}" if self.unit == "line" else f": {self.unit} {self.number}" if self.unit else ""
        return f"{self.file}{place}: {self.reason}"

    def line(self) -> str:
        """Return the entry's line in skipped.jsonl."""
        where = {self.unit: self.number} if self.unit else {}
        return json.dumps({"file": self.file, **where, "reason": self.reason[:_REASON_LIMIT]}, ensure_ascii=False)


class SkippedList:
    """Counts all skipped files and records, and lists as many as fit into `LISTED_BYTES`."""

    def __init__(self, entries: Iterable[SkippedInput] = ()) -> None:
        self.total = 0
        self.listed: list[SkippedInput] = []
        self._bytes = 0
        self.add(entries)

    def add(self, entries: Iterable[SkippedInput], more: int = 0) -> None:
        """Add entries to the list, and add `more` to the count of those that are not listed."""
        self.total += more
        for entry in entries:
            self.total += 1
            self._bytes += len(entry.line().encode(errors="replace"))
            if self._bytes <= LISTED_BYTES:
                self.listed.append(entry)

    def write(self, folder: Path) -> None:
        """Write the list into the folder if anything was skipped."""
        if self.total:
            head = json.dumps({"skipped": self.total, "listed": len(self.listed)})
            text = "\n".join([head, *(entry.line() for entry in self.listed), ""])
            write_text(folder / SKIPPED_NAME, text.encode(errors="backslashreplace").decode())


def read_skipped(folder: Path, most: int) -> tuple[int, int, list[SkippedInput]] | None:
    """Return (number skipped, number listed, the first `most` entries) of a corpus folder; None if it has no
    skipped.jsonl."""
    path = folder / SKIPPED_NAME
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        head = json.loads(file.readline())
        entries = [json.loads(line) for line in itertools.islice(file, most)]
    listed = []
    for entry in entries:
        unit = next((unit for unit in UNITS if unit in entry), "")
        listed.append(SkippedInput(entry["file"], entry["reason"], unit, entry.get(unit, 0)))
    return head["skipped"], head["listed"], listed


RECORD_BYTES = 64 * 1024 * 1024
"""Largest record in bytes. A longer one is a mistake (a file without line ends) and could fill the memory."""


class BadRecords:
    """Counts and lists bad records and damaged files; raises InputError at the first one where nothing may be
    skipped."""

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

    def add(self, path: Path, reason: str, unit: str = "", number: int = 0, damaged: bool = False) -> None:
        """Count a bad record of a file: the line, row or document (`unit`) number `number`. With `damaged`, count a
        file that is damaged from there on.

        Raises:
            InputError: nothing may be skipped.
        """
        entry = SkippedInput(str(path), reason, unit, number)
        if not self._skip:
            raise InputError(f"{entry}; mend it, or leave such records out with --skip-bad")
        self.count += 1
        if damaged:
            self.damaged.append(entry)
        elif len(self._listed) < LISTED_IN_UNIT:
            self._listed.append(entry)
