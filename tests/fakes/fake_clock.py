"""A clock that is moved by hand, or by whoever sleeps on it."""

from __future__ import annotations

from collections.abc import Callable


class FakeClock:
    """Time as an argument: `sleep` moves it and tells `on_sleep`."""

    def __init__(self, wall: float = 1_795_000_000.0, on_sleep: Callable[[float], None] = lambda seconds: None) -> None:
        self._now = 0.0
        self._wall = wall
        self._on_sleep = on_sleep

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall + self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self._on_sleep(seconds)
