"""Less work for Python's cyclic garbage collector: it is paused, and caches of methods need none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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


class cached_method(Generic[Owner, Arguments, Result]):  # noqa: N801  (a decorator, like cached_property)
    """Decorator: keep the results of a method in its object, one for each set of arguments, as `functools.cache` does.

    The results live as long as the object. The cache refers to the object weakly: with `self.x = cache(self._x)` object
    and cache refer to each other, so only the cyclic garbage collector can free them, and it scans all objects. So do
    not keep a method longer than its object. Arguments must be hashable. As with `functools.cache`, equal arguments
    given by position and by name are two calls.
    """

    def __init__(self, method: Callable[Concatenate[Owner, Arguments], Result]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type[Owner], name: str) -> None:
        self._name = name

    def __get__(self, instance: Owner | None, owner: type[Owner]) -> Callable[Arguments, Result]:
        if instance is None:
            return cast("Callable[Arguments, Result]", self)
        method, reference = self._method, weakref.ref(instance)

        @cache
        def cached(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            alive = reference()
            assert alive is not None, "only its object calls a method"
            return method(alive, *args, **kwargs)

        # From now on this entry is found before the decorator, so a call costs no more than one of `functools.cache`.
        instance.__dict__[self._name] = cached
        # The first call may be the only one, of an object that nothing else refers to.
        return MethodType(lambda _, *args, **kwargs: cached(*args, **kwargs), instance)
