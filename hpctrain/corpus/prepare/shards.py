"""Writes token shards of bounded size, and moves the shards of all work units into one corpus folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.errors import InputError
from hpctrain.corpus.prepare.tokenizer import Tokenizer
from hpctrain.records.corpus import INDEX_NAME, RECIPE_NAME, CorpusIndex, Shard, Sources

SHARD_TOKENS = 2**26
"""Most tokens in a shard: 128 MiB at two bytes a token, a file size that suits every file system."""


class ShardWriter:
    """Writes the tokens of one split to shards; starts a new shard when one is full."""

    def __init__(self, folder: Path, split: Literal["train", "valid"], dtype: str, shard_tokens: int) -> None:
        self._folder = folder
        self._split = split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._tokens = 0
        self._done: list[Shard] = []

    def append(self, tokens: NDArray[np.int64]) -> None:
        """Append the tokens; raise OSError if they cannot be written."""
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / self._name()).open("wb")
            part, tokens = np.split(tokens, [self._shard_tokens - self._tokens])
            data = part.astype(self._dtype).tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._tokens += len(part)
            if self._tokens == self._shard_tokens:
                self._finish_shard()

    def finish(self) -> list[Shard]:
        """Close the last shard and return all shards; they are then on disk."""
        self._finish_shard()
        return self._done

    def close(self) -> None:
        """Drop an unfinished shard."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # its content is dropped anyway
                self._file.close()
            self._file = None

    def _name(self) -> str:
        return f"{self._split}-{len(self._done):05d}.bin"

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._done.append(
            Shard(file=self._name(), split=self._split, tokens=self._tokens, sha256=self._digest.hexdigest())
        )
        self._digest = hashlib.sha256()
        self._tokens = 0


def holds_corpus(folder: Path) -> bool:
    """Whether `hpctrain data prepare` made the folder."""
    return (folder / INDEX_NAME).is_file() or (folder / RECIPE_NAME).is_file()


def check_target(folder: Path, force: bool) -> None:
    """Check before any work that the target folder may be written.

    Raises:
        InputError: the folder is not empty and `force` is not given, or it holds something other than a corpus.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"-o {folder}: found a file; name a new folder")
    if not any(folder.iterdir()):
        return
    if not holds_corpus(folder):
        raise InputError(f"-o {folder}: the folder is not empty and holds no corpus; name a new folder")
    if not force:
        raise InputError(f"-o {folder}: the folder holds a corpus already; add --force to replace it")


def link(source: Path, target: Path) -> None:
    """Give a file a second name by a hard link; where that is not supported, move it to the new name."""
    try:
        os.link(source, target)
    except OSError:
        source.rename(target)


_CHUNK_TOKENS = 2**20

Part = tuple[Path, list[Shard]]
"""The folder of a work unit, and the shards in it."""


def dtype_of(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the dtype in which tokens are stored."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_corpus(
    folder: Path, parts: Sequence[Part], tokenizer: Tokenizer, sources: Sources, shard_tokens: int
) -> CorpusIndex:
    """Fill a folder, which may exist, with the shards of the parts, and write its index last.

    Training shards are the units' own files. Validation shards are joined, because a unit's may be too short for a
    sequence.

    Raises:
        InputError: there are no tokens.
        StorageError: the folder cannot be written.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shards: list[Shard] = []
        for part, shard in _shards_of(parts, "train"):
            name = f"train-{len(shards):05d}.bin"
            link(part / shard.file, folder / name)
            shards.append(shard.model_copy(update={"file": name}))
        shards += _join_validation(folder, parts, tokenizer, shard_tokens)
        if not shards:
            raise InputError("IN: found no text: nothing is left of it after cleaning")
        index = CorpusIndex(
            vocab_size=tokenizer.vocab_size,
            dtype=dtype_of(tokenizer.vocab_size),
            tokenizer=tokenizer.save(folder),
            shards=shards,
            sources=sources,
        )
        index.write(folder / INDEX_NAME)
        sync(folder)
    return index


def _shards_of(parts: Sequence[Part], split: str) -> list[tuple[Path, Shard]]:
    return [(folder, shard) for folder, shards in parts for shard in shards if shard.split == split]


def _join_validation(folder: Path, parts: Sequence[Part], tokenizer: Tokenizer, shard_tokens: int) -> list[Shard]:
    dtype = np.dtype(dtype_of(tokenizer.vocab_size)).newbyteorder("<")
    writer = ShardWriter(folder, "valid", dtype.name, shard_tokens)
    with contextlib.closing(writer):
        for part, shard in _shards_of(parts, "valid"):
            with (part / shard.file).open("rb") as file:
                while data := file.read(_CHUNK_TOKENS * dtype.itemsize):
                    writer.append(np.frombuffer(data, dtype=dtype).astype(np.int64))
        return writer.finish()
