"""Reads the keys of one config.json, and collects the errors in them. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hpctrain.base.errors import FieldError, FileError
from hpctrain.records.format.validation_errors import dotted
from hpctrain.records.model.block_stack import TransformerSpec

SIZE_MAX = 2**31
"""Largest value of any size in a config.json; the spec checks each size further."""

SpecT = TypeVar("SpecT", bound=TransformerSpec)


class ConfigKeys:
    """Reads the keys of one config.json. A method that finds an error records it and returns a value of the right type,
    so that one FileError can list all errors."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source
        self._mistakes: list[FieldError] = []
        self.names: dict[str, str] = {}
        """Field of the spec -> key of the config.json that it was read from, for errors of the spec."""

    def size(self, key: str, default: int | None = None) -> int:
        """Return the whole number above 0 at `key` of the config.json, `default` if the key is absent or null. If the
        result is no such number, record an error and return 1."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= SIZE_MAX:
            return value
        self.refuse(key, f"a whole number above 0, up to {SIZE_MAX}")
        return 1

    def number(self, key: str, default: float | None = None) -> float:
        """Return the number above 0 at `key` of the config.json, `default` if the key is absent. If the result is no
        such number, record an error and return 1."""
        return self.positive(key, self._values.get(key, default))

    def positive(self, key: str, value: Any, name: str | None = None) -> float:
        """Return `value` if it is a number above 0; else record an error at `key` and return 1.

        Args:
            name: name of the value in the mapping at `key`; None: it is the value of `key` itself.
        """
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        self.refuse(key, "a number above 0" if name in (None, key) else f"{name} as a number above 0")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean at `key` of the config.json; `default` if the key is absent or null. For any other value,
        record an error and return `default`."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool):
            return value
        self.refuse(key, "true or false")
        return default

    def padding(self, default: int | None) -> int | None:
        """Return the padding token at the key `pad_token_id`, `default` if the key is absent, None if it is null. A
        number below 0 counts from the end of the vocabulary, as in torch. For any other value, record an error and
        return None."""
        value, vocabulary = self._values.get("pad_token_id", default), self.size("vocab_size")
        if value is None or (type(value) is int and -vocabulary <= value < vocabulary):
            return None if value is None else value % vocabulary
        self.refuse("pad_token_id", f"null, or a token of the vocabulary of {vocabulary}")
        return None

    def only(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """Return the value at `key` of the config.json if it is one of `allowed`; else record an error and return the
        first of `allowed`.

        Args:
            default: the value that transformers assumes if the key is absent.
        """
        value = self._values.get(key, default)
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            self.refuse(key, " or ".join(short_repr(choice) for choice in allowed))
            return allowed[0]
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def refuse(self, key: str, allowed: str) -> None:
        """Record the error that the value at `key` is not supported; `allowed` says in words which values are."""
        shown = f"found {short_repr(self._values[key])}" if key in self._values else "not there"
        mistake = FieldError(key, f"{shown}; allowed: {allowed}")
        if mistake not in self._mistakes:
            self._mistakes.append(mistake)

    def build_spec(self, kind: type[SpecT], **fields: Any) -> SpecT:
        """Return the spec of class `kind` with the given fields.

        Raises:
            FileError: an error was recorded, or the spec refuses a field; all errors are listed.
        """
        if not self._mistakes:
            try:
                return kind(**fields)
            except ValidationError as error:
                self._mistakes += [self._mistake(item, fields) for item in error.errors()]
        raise FileError(self._source, self._mistakes)

    def _mistake(self, item: ErrorDetails, fields: Mapping[str, Any]) -> FieldError:
        """Return an error of the spec, with keys of the config.json in place of fields of the spec.

        Args:
            item: the error, from pydantic.
            fields: the fields of the spec.
        """
        path, text = item["loc"], item["msg"].removeprefix("Value error, ")
        if len(path) > 1 and isinstance(fields[str(path[0])], dict):
            path = (path[0], *path[2:])  # the second part is the `mode`
        if item["type"] != "value_error":
            text = f"found {short_repr(item['input'])}; allowed: {text.removeprefix('Input should be ')}"
        else:
            # A name without _ is also a word. It is meant as a name where its value follows.
            names = r"\b(\w*_\w+|\w+(?= \d| / | is ))"
            text = re.sub(names, lambda match: self.names.get(match[0], match[0]), text)
        return FieldError(dotted(self.names.get(str(part), part) for part in path), text)


def short_repr(value: Any) -> str:
    """Return the value as JSON text, cut to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
