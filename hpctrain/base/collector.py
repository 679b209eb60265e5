"""Python's cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, as a context or a decorator.

    The collector scans all objects again and again while their number grows. Code that makes very many small objects,
    most of which stay, loses time to it, and it frees nearly nothing: a search for a plan loses a fifth of its time,
    the report of a long run two fifths.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
