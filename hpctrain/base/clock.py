"""The source of time, passed as an argument: pure functions take `now`, processes take a Clock, and tests pass a
FakeClock that they advance."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """The source of time of a process."""

    def now(self) -> float:
        """Return monotonic seconds from an arbitrary start; only differences have a meaning."""

    def wall(self) -> float:
        """Return seconds since 1970-01-01 UTC, as written to files."""

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` seconds."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def utc_text(wall: float) -> str:
    """Return wall-clock seconds as ISO 8601 UTC: 0 -> '1970-01-01T00:00:00Z'."""
    return datetime.fromtimestamp(wall, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
