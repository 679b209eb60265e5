"""A row of the table of architectures of transformers: what hpctrain knows of one class. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.hf.config_keys import ConfigKeys
from hpctrain.hf.settings import Setting
from hpctrain.hf.tensors import HfTensor
from hpctrain.records.model.families import FamilySpec


@dataclass(frozen=True)
class Architecture:
    """A row of the table: one class of transformers."""

    name: str
    """Name of the class, as config.json has it in `architectures`."""
    model_type: str
    """Name of the class's kind of config.json, `model_type`."""
    spec: type[Any]
    """The family of hpctrain's models."""
    settings: tuple[Setting, ...]
    """What the keys of config.json stand for in the spec."""
    tensors: Callable[[Any], Iterator[HfTensor]]
    """Returns the tensors of a model's spec, in the model's order."""
    ignored: tuple[str, ...] = ()
    """Regular expressions for the names of tensors that a folder may have, and that are skipped."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement) for names of tensors in early folders."""
    dropout: Mapping[str, float] = field(default_factory=lambda: {"attention_dropout": 0.0})
    """Key of a dropout in config.json -> rate that transformers assumes if the key is absent."""

    def read(self, keys: ConfigKeys) -> FamilySpec:
        """Return the spec that a config.json describes.

        Raises:
            FileError: keys are missing, have values that hpctrain's models lack, or contradict each other; all errors
                are listed.
        """
        fields: dict[str, Any] = {}
        if keys.get("quantization_config") is not None:
            keys.refuse("quantization_config", "null; save the model dequantized")
        for setting in self.settings:
            fields |= setting.read(keys)
        return keys.build_spec(self.spec, **fields)

    def write(self, spec: FamilySpec) -> dict[str, Any]:
        """Return the values of a config.json that describes the spec, as far as the architecture has keys for the
        spec's settings."""
        config: dict[str, Any] = {"architectures": [self.name], "model_type": self.model_type}
        config |= dict.fromkeys(self.dropout, 0.0)
        for setting in self.settings:
            config |= setting.write(spec)
        return config

    def current_name(self, name: str) -> str:
        """Return the name that transformers today gives to the tensor `name` of a folder: the rules of `renamed` are
        applied one after the other."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def is_ignorable(self, name: str) -> bool:
        """Return whether a tensor of a folder may be skipped. Such a tensor is a constant, is unused, or is part of
        BERT's pooler or its head for sentence order, which hpctrain does not train."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)
