"""A thread that makes the calls which may hang, so that another thread never waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class HelperThread(Executor):
    """Makes calls one after the other. Unlike the threads of a ThreadPoolExecutor, it never keeps its process from
    ending, even if a call hangs."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._is_shut = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Make a call after those that wait, and return its future, which also gets any error of the call."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Make no more calls, and never wait for the one that runs, whatever the arguments are. The futures of calls
        that wait never end."""
        self._is_shut = True
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None and not self._is_shut:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del item, future, call  # a result may be large


class Background(Protocol):
    """Begins calls that may take long, in another thread."""

    def __call__(self, call: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Begin one call, and return its future."""


def in_background(thread: Executor, wake: Callable[[], None]) -> Background:
    """Return a function that begins a call in `thread`, and calls `wake` when the call is done."""

    def begin(call: Callable[..., Result], *arguments: object) -> Future[Result]:
        future = thread.submit(call, *arguments)
        future.add_done_callback(lambda _: wake())
        return future

    return begin
