"""Reads a pickle as data. A pickle is a program that names functions and calls them, so Python's reader can run any
code. Here the program is followed, but nothing is imported and nothing is called: each object becomes a record of the
name, the arguments and the state that the pickle gives it.

The instructions are those that Python's picklers have written since protocol 2 (https://docs.python.org/3/library/
pickletools.html); any other one is an error.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PickledName:
    """A class, function or constant that a pickle names, as 'torch.float32'."""

    name: str


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object that a pickle describes. Two objects are equal only if they are the same."""

    name: str
    """Name of its class, or of the function that returns it; 'persistent' for an object outside the pickle."""
    arguments: tuple[Any, ...] = ()
    state: Any = None
    """Its attributes, mostly a dict by name; None if the pickle gives none."""


class PickleDataError(Exception):
    """The bytes are no pickle, or one with instructions that no pickler writes for plain data, or take too much
    memory."""


_MARK = object()
_NAME_CHARACTERS = 1000
"""Longest name of a class or function."""
_KEY_CHARACTERS = 2**16
"""Longest text that is a key of a mapping."""
_KEY_ITEMS = 8
"""Longest tuple that is a key of a mapping."""
_KEY_INTEGER = 2**61 - 1
"""Integers below this have hashes of their own. With the same hash for all its keys, a mapping is slow."""
_CONTAINERS = 2**24
"""Most containers, objects and places in the memo. One byte of a pickle makes one, which takes up to 200 bytes of
memory; the metadata of a checkpoint has about 15 for each part of a tensor."""


def pickle_data(data: bytes) -> Any:
    """Return the value that a pickle describes: Python's plain values, and `PickledName` and `PickledObject` for all
    else. A set is returned as a list.

    The time is linear in the length of `data`. The memory is limited, too, by _CONTAINERS.

    Raises:
        PickleDataError: the bytes are no pickle of such values, or take too much memory.
    """
    reader = _Reader()
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name == "STOP":
                return reader.pop()
            act = _OPERATIONS.get(operation.name)
            if act is None:
                raise PickleDataError(f"has the instruction {operation.name}, which is not read")
            act(reader, argument)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise PickleDataError(f"is no pickle ({' '.join(str(error).split()):.80})") from None
    except MemoryError:
        raise PickleDataError("takes more memory than there is") from None
    raise PickleDataError("ends in the middle")


class _Reader:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._containers = 0

    def push(self, value: Any) -> None:
        """Push a value that takes no memory of its own, or none beyond its bytes in the pickle."""
        self.stack.append(value)

    def push_new(self, value: Any) -> None:
        """Push a new container or object."""
        self._count()
        self.stack.append(value)

    def _count(self) -> None:
        self._containers += 1
        if self._containers > _CONTAINERS:
            raise ValueError(f"it has more than {_CONTAINERS} containers")

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark in the place of a value")
        return value

    def pop_to_mark(self) -> list[Any]:
        """Return the values above the topmost mark, and remove them and the mark."""
        values: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        values.reverse()
        return values

    def set_items(self, values: list[Any]) -> None:
        """Set entries of the mapping on top of the stack: key, value, key, value. Those of an object of another class
        are dropped.

        Raises:
            ValueError: on top of the stack is no mapping and no such object, or a key is of a type that is not allowed.
        """
        target = self.stack[-1]
        entries = {} if isinstance(target, PickledObject) else target
        if not isinstance(entries, dict):
            raise ValueError("entries for something that is no mapping")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not _is_key(key):
                raise ValueError("a key that is no short text, number, object or tuple of them")
            entries[key] = value

    def extend(self, values: list[Any]) -> None:
        """Append to the list on top of the stack. Items that a pickle appends to an object of another class are
        dropped.

        Raises:
            ValueError: on top of the stack is no list and no such object.
        """
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, PickledObject):
            raise ValueError("items for something that is no list")

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a name that is no text")
        if len(module) + len(name) > _NAME_CHARACTERS:
            raise ValueError(f"a name of more than {_NAME_CHARACTERS} characters")
        self.push_new(PickledName(f"{module}.{name}"))

    def call(self) -> None:
        arguments, called = self.pop(), self.pop()
        if not (isinstance(called, PickledName) and isinstance(arguments, tuple)):
            raise ValueError("a call of something that is no name")
        empty = called.name == "collections.OrderedDict" and not arguments
        self.push_new({} if empty else PickledObject(called.name, arguments))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, PickledObject):
            target.state = state

    def remember(self, number: int) -> None:
        value = self.stack[-1]
        if value is _MARK:
            raise ValueError("a mark in the place of a value")
        self._count()
        self.memo[number] = value


def _is_key(key: Any) -> bool:
    """Return whether a value may be a key of a mapping: one whose hash and whose comparison take a short time."""
    if isinstance(key, tuple):
        return len(key) <= _KEY_ITEMS and all(not isinstance(item, tuple) and _is_key(item) for item in key)
    if isinstance(key, str | bytes):
        return len(key) <= _KEY_CHARACTERS
    if isinstance(key, int):
        return abs(key) < _KEY_INTEGER
    return key is None or isinstance(key, PickledName | PickledObject)


def _tuple_of(count: int) -> Callable[[_Reader, Any], None]:
    def act(reader: _Reader, argument: Any) -> None:
        values = [reader.pop() for _ in range(count)]
        reader.push_new(tuple(reversed(values)))

    return act


def _stack_global(reader: _Reader, argument: Any) -> None:
    name, module = reader.pop(), reader.pop()
    reader.name(module, name)


def _set_item(reader: _Reader, argument: Any) -> None:
    value, key = reader.pop(), reader.pop()
    reader.set_items([key, value])


_LITERALS = (
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING",
)  # fmt: skip
_OPERATIONS: dict[str, Callable[[_Reader, Any], object]] = {
    **dict.fromkeys(_LITERALS, lambda reader, argument: reader.push(argument)),
    "PROTO": lambda reader, argument: None,
    "FRAME": lambda reader, argument: None,
    "NONE": lambda reader, argument: reader.push(None),
    "NEWTRUE": lambda reader, argument: reader.push(True),
    "NEWFALSE": lambda reader, argument: reader.push(False),
    "MARK": lambda reader, argument: reader.push(_MARK),
    "POP": lambda reader, argument: reader.stack.pop(),
    "POP_MARK": lambda reader, argument: reader.pop_to_mark(),
    "EMPTY_DICT": lambda reader, argument: reader.push_new({}),
    "EMPTY_LIST": lambda reader, argument: reader.push_new([]),
    "EMPTY_SET": lambda reader, argument: reader.push_new([]),
    "EMPTY_TUPLE": lambda reader, argument: reader.push_new(()),
    "TUPLE": lambda reader, argument: reader.push_new(tuple(reader.pop_to_mark())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "FROZENSET": lambda reader, argument: reader.push_new(reader.pop_to_mark()),
    "SETITEM": _set_item,
    "SETITEMS": lambda reader, argument: reader.set_items(reader.pop_to_mark()),
    "APPEND": lambda reader, argument: reader.extend([reader.pop()]),
    "APPENDS": lambda reader, argument: reader.extend(reader.pop_to_mark()),
    "ADDITEMS": lambda reader, argument: reader.extend(reader.pop_to_mark()),
    "GLOBAL": lambda reader, argument: reader.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": _stack_global,
    "NEWOBJ": lambda reader, argument: reader.call(),
    "REDUCE": lambda reader, argument: reader.call(),
    "BUILD": lambda reader, argument: reader.build(),
    "BINPERSID": lambda reader, argument: reader.push_new(PickledObject("persistent", (reader.pop(),))),
    "MEMOIZE": lambda reader, argument: reader.remember(len(reader.memo)),
    "BINPUT": lambda reader, argument: reader.remember(argument),
    "LONG_BINPUT": lambda reader, argument: reader.remember(argument),
    "BINGET": lambda reader, argument: reader.push(reader.memo[argument]),
    "LONG_BINGET": lambda reader, argument: reader.push(reader.memo[argument]),
}
