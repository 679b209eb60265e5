"""Checks whether the files of a corpus folder match its index."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.corpus.read.index import read_index
from hpctrain.records.corpus import INDEX_NAME, RECIPE_NAME, CorpusIndex, Recipe
from hpctrain.records.format.input_file import open_input

_CHUNK_BYTES = 1024 * 1024


def corpora_in(folder: Path) -> list[Path]:
    """Return the corpus folders that `folder` stands for: the folder itself, or those that a recipe made in it.

    Raises:
        InputError: `folder` is neither a corpus folder nor the output of a recipe.
    """
    if (folder / RECIPE_NAME).is_file() and not (folder / INDEX_NAME).exists():
        return [folder / source.name for source in Recipe.read(folder / RECIPE_NAME).sources]
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name one that `hpctrain data prepare` made")
    return [folder]


def check_corpus(folder: Path, report: Callable[[int], None]) -> CorpusIndex:
    """Read every file of a corpus folder and compare it with the index; `report` receives the bytes read.

    Raises:
        InputError: it is not a corpus folder.
        FileError: files are missing, truncated or changed; the message names all of them.
    """
    index = read_index(folder)
    width = np.dtype(index.dtype).itemsize
    mistakes: list[FieldError] = []
    for number, shard in enumerate(index.shards):
        text = _difference(folder / shard.file, shard.sha256, shard.tokens * width, report)
        if text:
            mistakes.append(FieldError(f"shards[{number}]", f"{shard.file} {text}; prepare the folder again"))
    tokenizer = index.tokenizer
    if tokenizer.file and tokenizer.sha256:
        text = _difference(folder / tokenizer.file, tokenizer.sha256, None, report)
        if text:
            mistakes.append(FieldError("tokenizer", f"{tokenizer.file} {text}; prepare the folder again"))
    if mistakes:
        raise FileError(folder / INDEX_NAME, mistakes)
    return index


def size_of(folder: Path) -> int:
    """Return the bytes of the existing files that the index of a corpus folder names.

    Raises:
        InputError: it is not a corpus folder.
    """
    index = read_index(folder)
    names = [shard.file for shard in index.shards] + ([index.tokenizer.file] if index.tokenizer.file else [])
    return sum((folder / name).stat().st_size for name in names if (folder / name).is_file())


def file_sha256(path: Path, report: Callable[[int], None] = lambda count: None) -> str:
    """Return the SHA-256 of a file, as hex.

    Raises:
        FileError: the file cannot be opened, or is not a regular file.
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with os.fdopen(open_input(path), "rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
            report(len(data))
    return digest.hexdigest()


def _difference(path: Path, sha256: str, size_bytes: int | None, report: Callable[[int], None]) -> str:
    """Return how a file differs from its size and hash in the index; '' if it does not."""
    try:
        size = path.stat().st_size
        if size_bytes is not None and size != size_bytes:
            return f"has {size} bytes, expected {size_bytes}"
        return "" if file_sha256(path, report) == sha256 else "is not what was written (its hash differs)"
    except FileError as error:
        return error.mistakes[0].text
    except OSError as error:
        return f"cannot be read: {error.strerror}"
