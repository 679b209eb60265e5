"""Records that cannot be used: told with their place, or counted."""

from __future__ import annotations

from hpctrain.base.errors import InputError

RECORD_BYTES = 64 * 1024 * 1024
"""A longer record is no document but an accident (a file without line ends), and would take all the memory."""


class BadRecords:
    """Counts what is left out; stops at the first where nothing may be."""

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.count = 0

    def found(self, place: str, text: str) -> None:
        """A record at `place` is of no use.

        Raises:
            InputError: nothing may be left out.
        """
        if not self._skip:
            raise InputError(f"{place}: {text}; mend it, or leave such records out with --skip-bad")
        self.count += 1
