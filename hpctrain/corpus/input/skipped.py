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
from typing import Any

from hpctrain.base.atomic import write_text

SKIPPED_NAME = "skipped.jsonl"
"""Name of the list within a corpus folder."""
LISTED_IN_UNIT = 1000
"""Most entries that a work unit lists."""
LISTED_BYTES = 4 * 1024 * 1024
"""Most bytes of a list on disk and in memory; further entries are only counted."""
UNITS = ("line", "row", "document")
"""What the number of an entry counts."""
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
        return f"{self.place()}: {self.reason}"

    def place(self) -> str:
        """'file:line', 'file: row 3', or the file."""
        if self.unit == "line":
            return f"{self.file}:{self.number}"
        return f"{self.file}: {self.unit} {self.number}" if self.unit else self.file

    def line(self) -> str:
        """The entry's line in the list."""
        where = {self.unit: self.number} if self.unit else {}
        return json.dumps({"file": self.file, **where, "reason": self.reason[:_REASON_LIMIT]}, ensure_ascii=False)


class SkippedList:
    """Counts all that is skipped, and lists as much as fits into `LISTED_BYTES`."""

    def __init__(self, entries: Iterable[SkippedInput] = ()) -> None:
        self.total = 0
        self.listed: list[SkippedInput] = []
        self._bytes = 0
        self.add(entries)

    def add(self, entries: Iterable[SkippedInput], more: int = 0) -> None:
        """Add entries, and count `more` that are not listed."""
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
    """(number skipped, number listed, the first entries); None for a folder without a list."""
    path = folder / SKIPPED_NAME
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        head = json.loads(file.readline())
        entries = [json.loads(line) for line in itertools.islice(file, most)]
    return head["skipped"], head["listed"], [_entry(value) for value in entries]


def _entry(value: dict[str, Any]) -> SkippedInput:
    unit = next((unit for unit in UNITS if unit in value), "")
    return SkippedInput(value["file"], value["reason"], unit, value.get(unit, 0))
