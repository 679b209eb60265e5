"""Keys that a person presses while a view is shown."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from hpctrain.base.clock import Clock


@contextlib.contextmanager
def pressed_keys(clock: Clock) -> Iterator[Callable[[float], str]]:
    """Yield a function that waits the given number of seconds, or until a key is pressed, and returns the pressed keys
    as text.

    Without a terminal that this process may read from, as in the background of a shell, the function waits and returns
    ''. Ctrl-C interrupts it in both cases.
    """
    try:
        descriptor = sys.stdin.fileno()
        is_ours = os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
        before = termios.tcgetattr(descriptor) if is_ours else None
    except (OSError, ValueError, termios.error):
        before = None
    if before is None:

        def wait(seconds: float) -> str:
            clock.sleep(seconds)
            return ""

        yield wait
        return

    def read(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return ""
        keys = os.read(descriptor, 64)
        if not keys:  # the terminal is gone
            clock.sleep(seconds)
        return keys.decode("ascii", "replace")

    tty.setcbreak(descriptor)
    try:
        yield read
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
