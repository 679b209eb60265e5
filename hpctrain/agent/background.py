"""Calls that may take long, because the file system hangs or because there is much to compute, in other threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Background(Protocol):
    """Begins calls that may take long, in another thread."""

    def __call__(self, call: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Begin one call."""


def in_background(thread: Executor, wake: Callable[[], None]) -> Background:
    """Return a function that begins a call in `thread`, and calls `wake` when the call is done."""

    def begin(call: Callable[..., Result], *arguments: object) -> Future[Result]:
        future = thread.submit(call, *arguments)
        future.add_done_callback(lambda _: wake())
        return future

    return begin
