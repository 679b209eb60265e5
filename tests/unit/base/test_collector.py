"""Caches of methods (`hpctrain.base.collector`)."""

from __future__ import annotations

import gc
import weakref

from hpctrain.base.collector import cached_method


class Squares:
    def __init__(self) -> None:
        self.asked: list[int] = []

    @cached_method
    def square(self, number: int) -> int:
        """Return the square of a number."""
        self.asked.append(number)
        return number * number


def test_a_result_is_computed_once_for_each_object_and_argument():
    one, other = Squares(), Squares()
    assert [one.square(3), one.square(3), one.square(4), other.square(3)] == [9, 9, 16, 9]
    assert (one.asked, other.asked) == ([3, 4], [3])
    assert Squares.square.__doc__ == "Return the square of a number."


def test_an_object_that_nothing_else_refers_to_answers():
    assert Squares().square(5) == 25


def test_an_object_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        squares = Squares()
        squares.square(2)
        squares.square(3)
        gone = weakref.ref(squares)
        del squares
        assert gone() is None
    finally:
        gc.enable()
