"""Parses JSON of any origin with bounded work; every error in the text is raised as a ValueError."""

from __future__ import annotations

import json
from typing import Any

LEVELS_MAX = 64
"""Most nested levels of a JSON text, so that code may walk a value by recursion. No file or message of hpctrain nests
half as deep."""
DIGITS_MAX = 40
"""Most digits of a whole number; 64 bits need 20. Python itself refuses numbers of more than 4300 digits, but with an
error that does not say where the number is."""


class JsonError(ValueError):
    """The text is no usable JSON. The message is for the user; `line` is the line number, or None where it is
    unknown."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, as `json.loads` does. Every number in it is finite.

    Raises:
        JsonError: the text is not JSON, nests deeper than LEVELS_MAX, or has a number that is not finite or too long.
    """
    try:
        whole = text.decode(json.detect_encoding(text)) if isinstance(text, bytes) else text
        value = (_BOUNDED_DECODER if _may_have_long_number(whole) else _DECODER).decode(whole)
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, error.lineno) from None
    except UnicodeDecodeError:
        raise JsonError("not a text in UTF-8") from None
    except RecursionError:
        raise JsonError(_nesting_error()) from None
    if whole.count("[") + whole.count("{") > LEVELS_MAX and _is_deeper(value, LEVELS_MAX):
        raise JsonError(_nesting_error())
    return value


def parse_integer(text: str, base: int = 10) -> int:
    """Return the whole number that a text stands for in base `base`.

    Raises:
        ValueError: the text is no whole number, or has more than DIGITS_MAX characters.
    """
    if len(text) > DIGITS_MAX:
        raise ValueError(f"found a number of {len(text):,} digits; allowed: up to {DIGITS_MAX}")
    return int(text, base)


def _whole(text: str) -> int:
    try:
        return parse_integer(text)
    except ValueError as error:
        raise JsonError(str(error)) from None


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise JsonError(f"found the number {text[:40]}, which is too large; allowed: finite numbers")
    return value


def _constant(text: str) -> Any:
    raise JsonError(f"found {text}; allowed: finite numbers")


_DECODER = json.JSONDecoder(parse_constant=_constant)
_BOUNDED_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_constant)
_DIGITS_ALIKE = bytes.maketrans(b"0123456789E", b"0000000000e")


def _may_have_long_number(text: str) -> bool:
    """Return whether a text may have a number of more than DIGITS_MAX digits, or one with an exponent of three digits.
    All other texts need no check of each number, which would double the time of reading the metrics of a long run. A
    regular expression would take five times as long as this search."""
    digits = text.encode("ascii", "replace").translate(_DIGITS_ALIKE, b"+")
    return b"0" * (DIGITS_MAX + 1) in digits or b"e000" in digits


def _nesting_error() -> str:
    return f"nested too deep; allowed: up to {LEVELS_MAX} levels"


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and mappings nest deeper than `levels`; computed without recursion."""
    here = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        here = [
            child
            for item in here
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not here:
            return False
    return bool(here)
