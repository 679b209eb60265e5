"""Writes token shards of bounded size, collects the shards of all work units in one corpus folder, and checks a corpus
folder against its index."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.base.regular_file import sha256_of
from hpctrain.corpus.prepare.tokenizer import Tokenizer
from hpctrain.corpus.read.tokens import read_index
from hpctrain.records.corpus import INDEX_NAME, RECIPE_NAME, CorpusIndex, Recipe, Shard, Sources
from hpctrain.records.format.input_file import open_input

SHARD_TOKENS = 2**26
"""Most tokens in a shard: 128 MiB at two bytes a token, a file size that suits every file system."""


class ShardWriter:
    """Writes the tokens of one split (training or validation) to shards; starts a new shard when one is full."""

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
        """Append the tokens to the current shard, or to new ones; raise OSError if they cannot be written."""
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
        """Finish the last shard and return the index entries of all shards, whose files are then on disk. Raise OSError
        if they cannot be written."""
        self._finish_shard()
        return self._done

    def close(self) -> None:
        """Close the file of an unfinished shard, which no index will name."""
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


def check_target(folder: Path, force: bool) -> None:
    """Check, before any other work, that the output folder may be written: it is new, empty, or a corpus to replace.

    Args:
        force: whether an existing corpus may be replaced.

    Raises:
        InputError: the folder holds a corpus and `force` is false, or it holds anything else.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"-o {folder}: found a file; name a new folder")
    if not any(folder.iterdir()):
        return
    if not any((folder / name).is_file() for name in (INDEX_NAME, RECIPE_NAME)):
        raise InputError(f"-o {folder}: the folder is not empty and holds no corpus; name a new folder")
    if not force:
        raise InputError(f"-o {folder}: the folder holds a corpus already; add --force to replace it")


def link(source: Path, target: Path) -> None:
    """Give the file `source` the second name `target` by a hard link; on a file system without hard links, rename
    it."""
    try:
        os.link(source, target)
    except OSError:
        source.rename(target)


_CHUNK_TOKENS = 2**20

Part = tuple[Path, list[Shard]]
"""The folder of a work unit, and the index entries of the shards in it."""


def dtype_of(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest dtype that holds all token ids of a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_corpus(
    folder: Path, parts: Sequence[Part], tokenizer: Tokenizer, sources: Sources, shard_tokens: int
) -> CorpusIndex:
    """Fill a new or empty folder with the shards of all work units (`parts`), write its index last, and return the
    index.

    Training shards are the units' own files. Validation shards are joined, because those of one unit may be shorter
    than a sequence.

    Args:
        sources: counts of the source's files, documents and skipped inputs.
        shard_tokens: most tokens in a validation shard.

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


def corpora_in(folder: Path) -> list[Path]:
    """Return the corpus folders in an output folder of `data prepare`: the folder itself or, if a recipe made it, the
    folder of each source.

    Raises:
        InputError: the folder does not exist.
        FileError: the copy of the recipe in it is damaged.
    """
    if (folder / RECIPE_NAME).is_file() and not (folder / INDEX_NAME).exists():
        return [folder / source.name for source in Recipe.read(folder / RECIPE_NAME).sources]
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name one that `hpctrain data prepare` made")
    return [folder]


def check_corpus(folder: Path, report: Callable[[int], None]) -> CorpusIndex:
    """Read every file of a corpus folder, compare it with the index, and return the index. `report` is called with
    the bytes that were read since its last call.

    Raises:
        InputError: the folder is no corpus folder.
        FileError: the index is damaged, or files are missing, truncated or changed; the message names all of them.
    """
    index = read_index(folder)
    width = np.dtype(index.dtype).itemsize
    files: list[tuple[str, str, str, int | None]] = [
        (f"shards[{number}]", shard.file, shard.sha256, shard.tokens * width)
        for number, shard in enumerate(index.shards)
    ]
    if index.tokenizer.file and index.tokenizer.sha256:
        files.append(("tokenizer", index.tokenizer.file, index.tokenizer.sha256, None))
    mistakes = [
        FieldError(field, f"{name} {text}; prepare the folder again")
        for field, name, sha256, size_bytes in files
        if (text := _difference(folder / name, sha256, size_bytes, report))
    ]
    if mistakes:
        raise FileError(folder / INDEX_NAME, mistakes)
    return index


def size_of(folder: Path) -> int:
    """Return the bytes of all existing files that the index of a corpus folder names.

    Raises:
        InputError: the folder is no corpus folder.
        FileError: the index is damaged.
    """
    index = read_index(folder)
    names = [shard.file for shard in index.shards] + ([index.tokenizer.file] if index.tokenizer.file else [])
    return sum((folder / name).stat().st_size for name in names if (folder / name).is_file())


def file_sha256(path: Path, report: Callable[[int], None] = lambda count: None) -> str:
    """Return the SHA-256 of a file, as hex; `report` is called with the number of bytes of each piece that was read.

    Raises:
        FileError: the file cannot be opened, or is not a regular file.
        OSError: the file cannot be read.
    """
    with os.fdopen(open_input(path), "rb") as file:
        return sha256_of(file.fileno(), report)


def _difference(path: Path, sha256: str, size_bytes: int | None, report: Callable[[int], None]) -> str:
    """Return how a file differs from the hash and size in the index (None: the index has no size), in words; '' if it
    does not differ. `report` is called with numbers of bytes read."""
    try:
        size = path.stat().st_size
        if size_bytes is not None and size != size_bytes:
            return f"has {size} bytes, expected {size_bytes}"
        return "" if file_sha256(path, report) == sha256 else "is not what was written (its hash differs)"
    except FileError as error:
        return error.mistakes[0].text
    except OSError as error:
        return f"cannot be read: {error.strerror}"
