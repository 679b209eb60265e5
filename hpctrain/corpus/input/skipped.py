"""The skipped input of a corpus: files and records with the reason why they were skipped, listed in skipped.jsonl in
the corpus folder.

The first line of skipped.jsonl is {"skipped": number of entries, "listed": number of lines that follow}. Each further
line is {"file", "line" (or "row" or "document"), "reason"}. The file exists only if something was skipped.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.errors import FieldError, FileError, InputError

SKIPPED_NAME = "skipped.jsonl"
"""Name of the file within a corpus folder that lists the skipped input."""
LISTED_IN_UNIT = 1000
"""Number of skipped files and records that a work unit lists at most; more are only counted."""
LISTED_BYTES = 4 * 1024 * 1024
"""Bytes that the list of skipped input may have on disk and in memory; further entries are only counted."""
UNITS = ("line", "row", "document")
"""What the number of a skipped record counts within its file."""
_REASON_LIMIT = 300
"""Number of characters of a reason that are written to skipped.jsonl."""


@dataclass(frozen=True)
class SkippedInput:
    """A file or a record that was skipped."""

    file: str
    reason: str
    unit: str = ""
    """What `number` counts, one of `UNITS`; '' if the whole file was skipped."""
    number: int = 0
    """Number of the line, row or document in the file, from 1; 0 if the whole file was skipped."""

    def __str__(self) -> str:
        """Return the entry for people: 'file:3: reason' (line 3), 'file: row 3: reason', or 'file: reason'."""
        place = f":{self.number}" if self.unit == "line" else f": {self.unit} {self.number}" if self.unit else ""
        return f"{self.file}{place}: {self.reason}"

    def line(self) -> str:
        """Return the entry as a JSON line of skipped.jsonl, without the line end."""
        where = {self.unit: self.number} if self.unit else {}
        return json.dumps({"file": self.file, **where, "reason": self.reason[:_REASON_LIMIT]}, ensure_ascii=False)


class SkippedList:
    """The skipped files and records of a corpus: counts all, and lists as many as fit into LISTED_BYTES."""

    def __init__(self, entries: Iterable[SkippedInput] = ()) -> None:
        self.total = 0
        self.listed: list[SkippedInput] = []
        self._bytes = 0
        self.add(entries)

    def add(self, entries: Iterable[SkippedInput], more: int = 0) -> None:
        """Add `entries` to the list of skipped input and to the count, and `more` unlisted ones to the count."""
        self.total += more
        for entry in entries:
            self.total += 1
            self._bytes += len(entry.line().encode(errors="replace"))
            if self._bytes <= LISTED_BYTES:
                self.listed.append(entry)

    def write(self, folder: Path) -> None:
        """Write the list of skipped input as skipped.jsonl into the folder, if anything was skipped.

        Raises:
            StorageError: the file cannot be written.
        """
        if self.total:
            head = json.dumps({"skipped": self.total, "listed": len(self.listed)})
            text = "\n".join([head, *(entry.line() for entry in self.listed), ""])
            write_text(folder / SKIPPED_NAME, text.encode(errors="backslashreplace").decode())


def read_skipped(folder: Path, most: int) -> tuple[int, int, list[SkippedInput]] | None:
    """Return (number skipped, number listed, the first `most` entries) from the skipped.jsonl of a corpus folder; None
    if the folder has no such file.

    Raises:
        FileError: the file cannot be read, or is damaged.
    """
    path = folder / SKIPPED_NAME
    if not path.is_file():
        return None
    listed = []
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
            for entry in map(json.loads, itertools.islice(file, most)):
                unit = next((unit for unit in UNITS if unit in entry), "")
                listed.append(SkippedInput(str(entry["file"]), str(entry["reason"]), unit, int(entry.get(unit, 0))))
        return int(head["skipped"]), int(head["listed"]), listed
    except OSError as error:
        raise FileError(path, [FieldError("", f"cannot read: {error.strerror}")]) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FileError(path, [FieldError("", "is damaged; make the corpus again to list what was skipped")]) from None


RECORD_BYTES = 64 * 1024 * 1024
"""Largest document of a file of JSON lines or of a table, in bytes. A larger one is a mistake (a file without line
ends) and could fill the memory."""


class BadRecords:
    """Counts and lists the records of a work unit that cannot be used, and its damaged files. If nothing may be
    skipped, the first one raises an InputError."""

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.count = 0
        """Number of skipped records, plus one for each damaged file."""
        self.damaged: list[SkippedInput] = []
        """Damaged files, whose content after the damage is lost."""
        self._listed: list[SkippedInput] = []

    @property
    def listed(self) -> list[SkippedInput]:
        """The first LISTED_IN_UNIT skipped inputs of the work unit; damaged files come before records."""
        return [*self.damaged, *self._listed][:LISTED_IN_UNIT]

    def add(self, path: Path, reason: str, unit: str = "", number: int = 0, damaged: bool = False) -> None:
        """Count and list a record of the file `path` that cannot be used.

        Args:
            unit: what `number` counts: 'line', 'row' or 'document'; '' for the whole file.
            number: position of the record in the file, from 1.
            damaged: whether the file is damaged from this position on, so that the rest of it is lost.

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
