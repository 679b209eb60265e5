"""The tokenizer files of an exported Hugging Face folder: the tokenizer of the run's corpus as the two files that
transformers reads, tokenizer.json and tokenizer_config.json. The settings in the second are those of the Hugging Face
folder from which the run started, if there is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from hpctrain.corpus.prepare.tokenizer import END_OF_TEXT, read_tokenizer
from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.corpus.read.tokens import read_index
from hpctrain.hf.source_settings import SourceSettings

MASK, START = "[MASK]", "<pad>"
"""Names of the mask and of the decoder's start token, if the objective adds them to the tokenizer."""


def hf_tokenizer(
    folder: Path, special: SpecialTokens, longest: int, source: SourceSettings | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Return the text of tokenizer.json and the values of tokenizer_config.json for the tokenizer of a corpus folder.
    tokenizer.json also names the special tokens that the objective adds.

    Args:
        folder: the corpus folder.
        special: special tokens of the run's objective.
        longest: most tokens of a sequence that the model takes.
        source: settings of the Hugging Face folder from which the run started.
        config: values of the export's config.json, whose `bos_token_id` and `pad_token_id` are named if they are added
            tokens of the tokenizer.

    Raises:
        InputError: the folder or its tokenizer is missing, or the tokenizer is damaged.
        FileError: the folder's index.json is damaged.
    """
    index = read_index(folder, "data.train[0]")
    if index.tokenizer.file is None:
        tokenizer = byte_tokenizer()
    else:
        tokenizer = read_tokenizer(folder / index.tokenizer.file, "data.train[0]")
    names = {number: name for name, number in _added(special).items() if tokenizer.id_to_token(number) is None}
    for number in sorted(names):
        if tokenizer.get_vocab_size() == number:  # ids are assigned in sequence
            tokenizer.add_special_tokens([AddedToken(names[number], special=True)])
    added = tokenizer.get_added_tokens_decoder()
    ids = {f"{kind}_token": (config or {}).get(f"{kind}_token_id") for kind in ("bos", "pad")}
    named = {"eos_token": special.end_of_text, "mask_token": special.mask, "pad_token": special.start}
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        **{key: added[number].content for key, number in ids.items() if type(number) is int and number in added},
        **(source or SourceSettings()).tokenizer_config(tokenizer.get_vocab(with_added_tokens=True).__contains__),
    }
    ours = {key: tokenizer.id_to_token(number) for key, number in named.items() if number is not None}
    values |= {key: value for key, value in ours.items() if value is not None}
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1) + "\n", values


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer of the `tokenizers` library with one token for each UTF-8 byte, whose id is the byte; token
    256 ends a document."""
    # Byte-level BPE without merges. Its alphabet maps a printable byte to its own character, and the others in order
    # to characters from 256 on (Radford et al. 2019).
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    vocabulary = {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer


def _added(special: SpecialTokens) -> dict[str, int]:
    """Return name -> id of the mask, the decoder's start token and the sentinels, as far as the objective has them."""
    tokens = {f"<extra_id_{place}>": number for place, number in enumerate(special.sentinels)}
    for name, number in ((MASK, special.mask), (START, special.start)):
        if number is not None:
            tokens[name] = number
    return tokens
