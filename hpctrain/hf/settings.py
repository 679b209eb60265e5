"""The kinds of settings that a row of the table of architectures (`architectures.py`) is made of. A setting reads keys
of a config.json into fields of a model's spec, and writes them back. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hpctrain.hf.config_keys import ConfigKeys

EFFECTIVE = {
    "kv_heads": "key_value_heads", "ffn_dim": "hidden", "vocab": "vocabulary", "head_dim": "head_width",
    "encoder_layers": "seam", "score_width": "score_divisor",
}  # fmt: skip
"""Field of a spec that may be absent -> property with the value that then holds."""


def effective(spec: Any, field: str) -> Any:
    """Return the value that holds for a field of a spec, whether the field was given or not."""
    return getattr(spec, EFFECTIVE.get(field, field))


class Setting(Protocol):
    """One or several keys of a config.json, and the fields of a spec that they stand for."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        """Return field of the spec -> value. A value that hpctrain's models lack is recorded as an error in `keys`."""
        ...

    def write(self, spec: Any) -> dict[str, Any]:
        """Return key of the config.json -> value."""
        ...


@dataclass(frozen=True)
class _OneKey(ABC):
    """Base class of a setting with one key and one field."""

    field: str
    """Field of the model's spec."""
    key: str
    """Key of the config.json."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        keys.names[self.field] = self.key
        return {self.field: self.value(keys)}

    def write(self, spec: Any) -> dict[str, Any]:
        return {self.key: effective(spec, self.field)}

    @abstractmethod
    def value(self, keys: ConfigKeys) -> Any:
        """Return the value of the field."""


@dataclass(frozen=True)
class Size(_OneKey):
    """A setting that is a whole number above 0."""

    default: int | Callable[[ConfigKeys], int] | None = None
    """What transformers assumes if the key is absent or null; None: the key must be there."""

    def value(self, keys: ConfigKeys) -> int:
        return keys.size(self.key, self.default(keys) if callable(self.default) else self.default)


@dataclass(frozen=True)
class HeadWidth:
    """The key `head_dim`, which a spec has only if it is not the width divided by the number of heads."""

    default: int | None = None
    """What transformers assumes if the key is absent; None: width divided by number of heads."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        usual = keys.size("hidden_size") // keys.size("num_attention_heads") or 1
        width = keys.size("head_dim", self.default or usual)
        return {"head_dim": None if width == usual else width}

    def write(self, spec: Any) -> dict[str, Any]:
        return {"head_dim": spec.head_width}


@dataclass(frozen=True)
class Number(_OneKey):
    """A number above 0."""

    default: float | None
    """What transformers assumes if the key is absent; None: null."""
    or_null: bool = False
    """Whether the value may be null, which is None in the spec."""

    def value(self, keys: ConfigKeys) -> float | None:
        if self.or_null and keys.get(self.key, self.default) is None:
            return None
        return keys.number(self.key, self.default)


@dataclass(frozen=True)
class Flag(_OneKey):
    """A setting that is true or false: a key of the config.json and the field of the spec with the same value."""

    default: bool
    """What transformers assumes if the key is absent or null."""

    def value(self, keys: ConfigKeys) -> bool:
        return keys.flag(self.key, self.default)


@dataclass(frozen=True)
class OneOf(_OneKey):
    """A key with a few allowed values, each of which stands for a value of the field."""

    values: Mapping[Any, Any]
    """Value of the key -> value of the field. If several values of the key stand for one value of the field, `write`
    takes the first of them."""
    default: Any
    """Value of the key that transformers assumes if it is absent."""

    def value(self, keys: ConfigKeys) -> Any:
        return self.values[keys.only(self.key, *self.values, default=self.default)]

    def write(self, spec: Any) -> dict[str, Any]:
        value = getattr(spec, self.field)
        return {self.key: next((key for key, held in self.values.items() if held == value), self.default)}


@dataclass(frozen=True)
class Only:
    """A key that no field stands for, with the values of it that hpctrain's models compute."""

    key: str
    allowed: tuple[Any, ...]
    """Values that are allowed; the first is written."""
    default: Any
    """What transformers assumes if the key is absent."""
    written: bool = True
    """Whether an export has the key. False for a key that folders of the architecture usually lack."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        keys.only(self.key, *self.allowed, default=self.default)
        return {}

    def write(self, spec: Any) -> dict[str, Any]:
        return {self.key: self.allowed[0]} if self.written else {}


@dataclass(frozen=True)
class Padding:
    """The key `pad_token_id`, in classes whose embedding has the `padding_idx` of torch's `nn.Embedding`."""

    default: int | None = None
    """Token that transformers assumes if the key is absent."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        return {"padding_id": keys.padding(self.default)}

    def write(self, spec: Any) -> dict[str, Any]:
        return {"pad_token_id": spec.padding_id}


@dataclass(frozen=True)
class Fixed:
    """Fields of the spec that have the same values in all models of the architecture, and no key in config.json."""

    fields: Mapping[str, Any]

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        return dict(self.fields)

    def write(self, spec: Any) -> dict[str, Any]:
        return {}


SIZES = (
    Size("dim", "hidden_size"), Size("heads", "num_attention_heads"), Size("layers", "num_hidden_layers"),
    Size("ffn_dim", "intermediate_size"), Size("vocab", "vocab_size"),
)  # fmt: skip
"""The sizes of most architectures."""
TIED, UNTIED = Flag("tied", "tie_word_embeddings", True), Flag("tied", "tie_word_embeddings", False)
"""Whether the head is tied. Without the key, transformers assumes that it is (TIED) or that it is not (UNTIED)."""
INIT_STD = Number("init_std", "initializer_range", 0.02)
CAUSAL = Only("is_causal", (True,), True, written=False)
"""Transformers 5 masks later tokens unless this key is false."""
