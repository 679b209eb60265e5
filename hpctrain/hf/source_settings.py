"""The settings of tokenizer and text generation of the Hugging Face folder from which a run started. An export has
them, too, as far as they fit the data that the model was trained on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.base.errors import FieldError, FileError
from hpctrain.records.format.document import read_json
from hpctrain.records.format.input_file import read_input_text

TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS = "special_tokens_map.json"
"""File in which early folders name the special tokens."""
_LIMIT_BYTES = 16 * 2**20
_ABOUT_FILES = ("added_tokens_decoder", "backend", "is_local", "name_or_path", "model_max_length", "auto_map")
"""Keys of tokenizer_config.json that an export does not have: they are about classes, files and sizes of the original
folder. Keys that end with `_class` or `_file` are such keys, too."""


@dataclass(frozen=True)
class SourceSettings:
    """What a Hugging Face folder says of its tokenizer and of generation; empty or None where the folder has no such
    file."""

    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """Values of tokenizer_config.json, and of special_tokens_map.json where that file has none."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Values of generation_config.json."""
    chat_template: str | None = None
    """Text of chat_template.jinja."""

    def tokenizer_config(self, is_token: Callable[[str], bool]) -> dict[str, Any]:
        """Return the values for the tokenizer_config.json of an export.

        Special tokens for which `is_token` is false are left out: transformers would give them new ids, for which the
        model has no embedding.
        """
        config: dict[str, Any] = {}
        for key, value in self.tokenizer.items():
            if key in _ABOUT_FILES or key.endswith(("_class", "_file")):
                continue
            if key.endswith("_special_tokens"):
                config[key] = _known_tokens(value, is_token)
            elif not key.endswith("_token") or value is None or isinstance(value, bool) or is_token(_content(value)):
                config[key] = value
        return config

    def generation_config(self, config: Mapping[str, Any], end: int) -> dict[str, Any]:
        """Return the values for the generation_config.json of an export: those of the folder, completed by `config`.
        An `eos_token_id` of the folder without the token `end` is replaced by that of `config`.

        Args:
            config: values of the config.json of the export.
            end: token that ends a document of the data.
        """
        keys = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
        values = {key: config[key] for key in keys if config.get(key) is not None}
        values |= self.generation
        for key in ("transformers_version", "_from_model_config"):
            values.pop(key, None)
        return values | {"eos_token_id": with_end(self.generation.get("eos_token_id"), end, config.get("eos_token_id"))}


def read_source_settings(folder: Path) -> SourceSettings:
    """Return the settings in a Hugging Face folder.

    Raises:
        FileError: a file is damaged, too large or not regular.
    """
    template = folder / CHAT_TEMPLATE
    return SourceSettings(
        _values(folder / _SPECIAL_TOKENS) | _values(folder / TOKENIZER_CONFIG),
        _values(folder / GENERATION_CONFIG),
        read_input_text(template, _LIMIT_BYTES) if os.path.lexists(template) else None,
    )


def with_end(eos_token_id: Any, end: int, otherwise: Any) -> Any:
    """Return the `eos_token_id` of a folder if it is the token `end`, or a list with that token; else `otherwise`."""
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return eos_token_id if end in ends else otherwise


def _values(path: Path) -> dict[str, Any]:
    values = read_json(path, _LIMIT_BYTES) if os.path.lexists(path) else {}
    if not isinstance(values, dict):
        raise FileError(path, [FieldError("", "found no keys; copy the file again, or remove it")])
    return values


def _content(token: Any) -> str:
    """Return the text of a special token in tokenizer_config.json, which is a string or a table with the text."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _known_tokens(tokens: Any, is_token: Callable[[str], bool]) -> Any:
    """Return a list or table of special tokens without those for which `is_token` is false."""
    if isinstance(tokens, dict):
        return {name: token for name, token in tokens.items() if is_token(_content(token))}
    return [token for token in tokens if is_token(_content(token))] if isinstance(tokens, list) else []
