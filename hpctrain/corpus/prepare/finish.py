"""The last step of preparation: the shards of all units become one corpus folder with its index."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.errors import InputError
from hpctrain.corpus.prepare.shards import ShardWriter, link
from hpctrain.corpus.prepare.tokenizer import Tokenizer
from hpctrain.records.corpus.index import INDEX_NAME, CorpusIndex, Shard, Sources

_CHUNK_TOKENS = 2**20

Part = tuple[Path, list[Shard]]
"""The folder of a unit, and its shards."""


def dtype_of(vocab_size: int) -> str:
    """The dtype in which tokens are stored."""
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
        for part, shard in ((part, shard) for part, own in parts for shard in own if shard.split == "train"):
            name = f"train-{len(shards):05d}.bin"
            link(part / shard.file, folder / name)
            shards.append(shard.model_copy(update={"file": name}))
        shards += _join_validation(folder, parts, tokenizer, shard_tokens)
        if not shards:
            raise InputError("IN: found no text: nothing is left of it after cleaning")
        index = CorpusIndex(
            vocab_size=tokenizer.vocab_size,
            dtype="uint16" if dtype_of(tokenizer.vocab_size) == "uint16" else "uint32",
            tokenizer=tokenizer.save(folder),
            shards=shards,
            sources=sources,
        )
        index.write(folder / INDEX_NAME)
        sync(folder)
    return index


def _join_validation(folder: Path, parts: Sequence[Part], tokenizer: Tokenizer, shard_tokens: int) -> list[Shard]:
    dtype = np.dtype(dtype_of(tokenizer.vocab_size)).newbyteorder("<")
    writer = ShardWriter(folder, "valid", dtype.name, shard_tokens)
    with contextlib.closing(writer):
        for part, shard in ((part, shard) for part, own in parts for shard in own if shard.split == "valid"):
            with (part / shard.file).open("rb") as file:
                while data := file.read(_CHUNK_TOKENS * dtype.itemsize):
                    writer.append(np.frombuffer(data, dtype=dtype).astype(np.int64))
        return writer.finish()
