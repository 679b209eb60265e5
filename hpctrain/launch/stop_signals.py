"""Catches the signals that stop a run in the foreground: the first Ctrl-C lets the run save a checkpoint, the second
ends the run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(on_first: Callable[[], None], on_further: Callable[[], None]) -> Iterator[None]:
    """Call `on_first` at the first SIGINT or SIGTERM within the context, and `on_further` at each later one."""
    is_first = True

    def stop(*_: object) -> None:
        nonlocal is_first
        react, is_first = (on_first if is_first else on_further), False
        react()

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
