"""Files that somebody else made, to try readers on: valid documents with pieces lost, repeated and replaced, and any
bytes at all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from hpctrain.base.errors import HpctrainError

_DEEP, _DIGITS = "@deep@", "@digits@"
_TEXTS = {f'"{_DEEP}"': "[" * 1200 + "]" * 1200, f'"{_DIGITS}"': "9" * 5000}
"""What no Python value stands for: written into the JSON text in the place of these words."""

ODD: list[Any] = [
    None, True, False, "", "0", 0, -1, 1, 0.5, 10**9, 10**12, 2**31, 2**63, -(2**63), 10**30, 10**300, 1e308, -1e308,
    1e-320, float("nan"), float("inf"), float("-inf"), "nan", "²", "a\0b", "\x1b[31mred", "two\nlines", "\u2028",
    "\ud800",
    "../../../.bash_profile", "/etc/passwd", ".", "..", ".hidden", "a/b", "x" * 5000, "@all", "n[0-99999999]",
    "%s", "{}", [], {}, [[]], [None], {"": 0}, {"a\x1b[2J": 1}, [0, -1], [[["a"]]], _DEEP, _DIGITS,
]  # fmt: skip
_ODD_BYTES = st.sampled_from(
    [b"", b"\0", b"\xff", b"\xed\xa0\x80", b"9" * 5000, b"[" * 1200, b"NaN", b"\n", b"\x1b[2J"]
)
KEYS = ["", "strange", "a\nb", "\x1b[31m", "\ud800", "k" * 600, "0", "schema", "__class__", "model_config"]


@st.composite
def mutated(draw: st.DrawFn, valid: Any, most: int = 3) -> Any:
    """The valid value with up to `most` pieces deleted, replaced, repeated, renamed or exchanged."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(value))
        if not places:
            return draw(st.sampled_from(ODD))
        holder, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "replace", "delete", "repeat", "rename", "exchange"])):
            case "replace":
                odd = draw(st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=8))
                holder[key] = copy.deepcopy(odd)
            case "delete":
                del holder[key]
            case "repeat" if isinstance(holder, list):
                holder.extend([holder[key]] * draw(st.sampled_from([1, 50])))
            case "rename" if isinstance(holder, dict):
                holder[draw(st.sampled_from(KEYS))] = holder.pop(key)
            case _:
                other, place = draw(st.sampled_from(places))
                if place in other if isinstance(other, dict) else place < len(other):
                    holder[key] = copy.deepcopy(other[place])
    return value


def as_json(value: Any) -> bytes:
    """The JSON text of a value of `mutated`; half a surrogate pair is written as an escape."""
    text = json.dumps(value)
    for word, stands_for in _TEXTS.items():
        text = text.replace(word, stands_for)
    return text.encode()


@st.composite
def hostile_json(draw: st.DrawFn, *valid: Any) -> bytes:
    """The bytes of a file that was one of the valid values: mutated as a value, as bytes, or any bytes."""
    kind = draw(st.sampled_from(["value", "value", "value", "value", "bytes", "any"]))
    if kind == "any":
        return draw(st.binary(max_size=64))
    data = as_json(draw(mutated(draw(st.sampled_from(valid)))))
    return data if kind == "value" else draw(damaged(data))


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with pieces cut off, lost, repeated or replaced."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        stop = draw(st.integers(start, min(len(data), start + 16)))
        data = data[:start] + draw(_ODD_BYTES | st.binary(max_size=8)) + data[stop:]
    return data[: draw(st.sampled_from([len(data), len(data) // 2]))]


def check_reader(read: Callable[[Path], object], path: Path) -> object:
    """The value that the reader gives, or the project's own error, whose lines name the file and can be printed.

    Anything else that the reader raises goes through, and fails the test.
    """
    try:
        return read(path)
    except HpctrainError as error:
        text = str(error)
        assert len(text.splitlines()) <= 60, "a person reads the first mistakes, not thousands"
        for line in text.splitlines() or [""]:
            assert path.name in line or str(path.parent) in line or "mistakes more" in line, line
            assert line.isprintable(), line
            assert len(line) < 2000, line
            line.encode()
        return None


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in the value with each of its keys."""
    found: list[tuple[Any, Any]] = []
    rest = [value]
    while rest:
        here = rest.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else []
        found += [(here, key) for key in keys]
        rest += [here[key] for key in keys]
    return found
