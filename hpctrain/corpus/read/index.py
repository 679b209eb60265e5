"""Reads the indexes of corpus folders, and checks that folders which are used together have equal tokenizers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import FileError, InputError
from hpctrain.records.corpus import INDEX_NAME, CorpusIndex
from hpctrain.records.format.bounds import TOKENIZER_BYTES
from hpctrain.records.format.input_file import read_input


def read_index(folder: str | Path, field: str = "") -> CorpusIndex:
    """Read the index of a corpus folder; `field` names it in errors ('data.train[0]').

    Raises:
        InputError: the folder does not exist, or `hpctrain data prepare` did not make it.
        FileError: its index is damaged.
    """
    path = Path(folder)
    where = f"{field}: {path}" if field else str(path)
    if not path.exists():
        raise InputError(f"{where}: no such folder; make it with `hpctrain data prepare IN... -o {path}`")
    if not (path / INDEX_NAME).is_file():
        raise InputError(
            f"{where}: found no {INDEX_NAME} in it, so it holds no token shards; "
            f"make them with `hpctrain data prepare IN... -o FOLDER`"
        )
    return CorpusIndex.read(path / INDEX_NAME)


def read_indexes(folders: Sequence[str | Path], field: str = "data.train") -> list[CorpusIndex]:
    """Read the indexes of folders that are used together.

    Raises:
        InputError: no folder is given, a folder is missing, or their tokenizers differ.
    """
    if not folders:
        raise InputError(f"{field}: found no folder; name at least one, made with `hpctrain data prepare IN... -o DIR`")
    indexes = [read_index(folder, f"{field}[{number}]") for number, folder in enumerate(folders)]
    for number, index in enumerate(indexes):
        if not same_tokens(index, indexes[0]):
            raise InputError(
                f"{field}[{number}]: {folders[number]}: its tokenizer ({describe_tokenizer(index)}) is not that of "
                f"{folders[0]} ({describe_tokenizer(indexes[0])}); prepare it again with "
                f"{tokenizer_option(folders[0], indexes[0])}"
            )
    return indexes


def check_tokenizer(folders: Sequence[str | Path], tokenizer: str | Path) -> None:
    """Check that the tokens in the folders were made with the tokenizer.json at `tokenizer`.

    Raises:
        InputError: the file cannot be read, or the folders were made with another tokenizer.
    """
    index = read_indexes(folders)[0]
    try:
        digest = hashlib.sha256(read_input(Path(tokenizer), TOKENIZER_BYTES)).hexdigest()
    except FileError as error:
        raise InputError(f"data.tokenizer: {tokenizer}: {error.mistakes[0].text}") from None
    if digest != index.tokenizer.sha256:
        raise InputError(
            f"data.tokenizer: {tokenizer}: the data was made with another tokenizer ({describe_tokenizer(index)}); "
            f"leave the key out, or prepare the data again with --tokenizer {tokenizer}"
        )


def same_tokens(one: CorpusIndex, other: CorpusIndex) -> bool:
    """Whether two corpora have the same tokenizer; kind 'trained' and kind 'given' with equal files are the same."""
    keys = [(i.vocab_size, i.tokenizer.end_of_text, i.tokenizer.sha256) for i in (one, other)]
    return keys[0] == keys[1]


def describe_tokenizer(index: CorpusIndex) -> str:
    """Return the tokenizer in words: 'bytes, vocabulary 257' or 'trained 1a2b3c4d, vocabulary 4096'."""
    digest = f" {index.tokenizer.sha256[:8]}" if index.tokenizer.sha256 else ""
    return f"{index.tokenizer.kind}{digest}, vocabulary {index.vocab_size}"


def tokenizer_option(folder: str | Path, index: CorpusIndex) -> str:
    """Return the option that makes `hpctrain data prepare` use the tokenizer of that folder."""
    return f"--tokenizer {Path(folder) / index.tokenizer.file if index.tokenizer.file else 'bytes'}"
