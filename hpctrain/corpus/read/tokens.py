"""Reads corpus folders: their indexes, and their memory-mapped token shards as one endless, shuffled stream of windows.

Which window of the corpus is sample number i of a run is a pure function of (seed, i), whatever the plan. The order of
windows in an epoch is a permutation that is computed, never stored: a Feistel network over the smallest power of four
that is no smaller than the number of windows. A result outside the range goes through the network again until it is
inside (cycle walking). Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 3
(cycle walking) and 4 (Feistel). The permutation need not resist an adversary, so the round function is the mixer of
SplitMix64 (Steele, Lea, Flood 2014) and not a cipher.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.records.corpus import INDEX_NAME, CorpusIndex
from hpctrain.records.format.document import TOKENIZER_BYTES
from hpctrain.records.format.input_file import read_input

Split = Literal["train", "valid", "all"]
UInt64 = NDArray[np.uint64]

ROUNDS = 6
"""Rounds of the Feistel network. Four make it indistinguishable from a random permutation (Luby and Rackoff 1988); two
more are added because the halves of the number have few bits if the corpus is small."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def read_index(folder: str | Path, field: str = "") -> CorpusIndex:
    """Return the index of a corpus folder.

    Args:
        field: key of the run file that names the folder, for errors: 'data.train[0]'.

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
    """Return the indexes of corpus folders that a run uses together, which need equal tokenizers.

    Args:
        field: key of the run file that names the folders, for errors.

    Raises:
        InputError: no folder is given, a folder is missing, or the folders' tokenizers differ.
        FileError: an index is damaged.
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
    """Return whether two corpora have the same tokenizer. The tokenizer may have been trained for one corpus and given
    as a file for the other."""
    keys = [(i.vocab_size, i.tokenizer.end_of_text, i.tokenizer.sha256) for i in (one, other)]
    return keys[0] == keys[1]


def describe_tokenizer(index: CorpusIndex) -> str:
    """Return the tokenizer of a corpus in words, with the first 8 digits of its file's hash if it has a file: 'bytes,
    vocabulary 257' or 'trained 1a2b3c4d, vocabulary 4096'."""
    digest = f" {index.tokenizer.sha256[:8]}" if index.tokenizer.sha256 else ""
    return f"{index.tokenizer.kind}{digest}, vocabulary {index.vocab_size}"


def tokenizer_option(folder: str | Path, index: CorpusIndex) -> str:
    """Return the option, '--tokenizer …', with which `hpctrain data prepare` uses the tokenizer of the corpus
    folder."""
    return f"--tokenizer {Path(folder) / index.tokenizer.file if index.tokenizer.file else 'bytes'}"


@dataclass(frozen=True)
class Corpus:
    """One split of one or more corpus folders, as windows of tokens.

    A window is `seq_len` tokens and the token after them, with which the next window begins. So the inputs of two
    windows do not overlap. A window lies within one shard.
    """

    seq_len: int
    """Tokens of a sequence, which is a window without its last token."""
    vocab_size: int
    """Vocabulary size: token ids are below it."""
    shards: tuple[NDArray[np.unsignedinteger], ...]
    """Tokens of each shard that holds at least one window, memory-mapped."""
    first_window: NDArray[np.int64]
    """Index of each shard's first window, followed by the total number of windows: [shards + 1]."""

    @classmethod
    def open(cls, folders: Sequence[str | Path], split: Split, seq_len: int, field: str = "data.train") -> Corpus:
        """Open one split of the corpus folders: 'train', 'valid', or 'all' for both.

        Args:
            field: key of the run file that names the folders, for errors.

        Raises:
            InputError: a folder is missing, tokenizers differ, or there are too few tokens for one sequence.
            FileError: an index is damaged, or a shard is missing or truncated.
        """
        indexes = read_indexes(folders, field)
        maps = [
            _map_shard(Path(folder), number, index)
            for folder, index in zip(folders, indexes, strict=True)
            for number, shard in enumerate(index.shards)
            if split in (shard.split, "all") and shard.tokens > seq_len
        ]
        if not maps:
            available = sum(s.tokens for index in indexes for s in index.shards if split in (s.split, "all"))
            raise InputError(
                f"{field}: {', '.join(map(str, folders))}: found {available} tokens in the {split} split, which is not "
                f"one sequence of {seq_len} tokens and its target; prepare more text or lower data.seq_len"
            )
        windows = [(len(tokens) - 1) // seq_len for tokens in maps]
        first = np.concatenate([[0], np.cumsum(windows)]).astype(np.int64)
        return cls(seq_len, indexes[0].vocab_size, tuple(maps), first)

    @property
    def windows(self) -> int:
        """Number of windows, which is the number of samples in an epoch."""
        return int(self.first_window[-1])

    @property
    def tokens(self) -> int:
        """Number of tokens in all of `shards`."""
        return sum(len(shard) for shard in self.shards)

    def rows(self, seed: int, start: int, count: int) -> NDArray[np.int64]:
        """Return the windows of samples [start, start + count) of the endless shuffled stream: [count, seq_len + 1].

        The first seq_len columns are the input, the last seq_len the targets. A sample depends only on the seed and its
        number in the run, so each process may read its own part of a batch.
        """
        return self.pick(seed, np.arange(start, start + count, dtype=np.int64))

    def pick(self, seed: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows of the samples with the given numbers in the run, int64 [n, seq_len + 1]."""
        _, windows = sample(seed, samples, self.windows)
        return self.read_windows(windows)

    def read_windows(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of the windows with the given indices, int64 [n, seq_len + 1]."""
        rows = np.empty((len(windows), self.seq_len + 1), dtype=np.int64)
        owners = np.searchsorted(self.first_window, windows, side="right") - 1
        for row, window, owner in zip(rows, windows, owners, strict=True):
            begin = int(window - self.first_window[owner]) * self.seq_len
            row[:] = self.shards[owner][begin : begin + self.seq_len + 1]
        return rows


def open_validation(train: Sequence[str | Path], valid: Sequence[str | Path], seq_len: int) -> Corpus | None:
    """Open the validation corpus of a run: the folders in `valid` if there are any, else the validation part of the
    folders in `train`. Return None if that part has too few tokens for one sequence.

    Raises:
        InputError: a folder is missing, there are too few tokens in `valid`, or tokenizers differ.
        FileError: an index is damaged, or a shard is missing or truncated.
    """
    indexes = read_indexes(train)
    if valid:
        _check_same_tokens("data.valid[0]", valid[0], read_indexes(valid, "data.valid")[0], train[0], indexes[0])
        return Corpus.open(valid, "all", seq_len, "data.valid")
    enough = any(shard.split == "valid" and shard.tokens > seq_len for index in indexes for shard in index.shards)
    return Corpus.open(train, "valid", seq_len) if enough else None


def open_named(train: Sequence[str | Path], named: Mapping[str, str], seq_len: int) -> dict[str, Corpus]:
    """Return name -> corpus for named validation folders (`named`: name -> folder); each corpus is all of its folder,
    training and validation part.

    Raises:
        InputError: a folder is missing, has too few tokens for one sequence, or has another tokenizer than `train`.
        FileError: an index is damaged, or a shard is missing or truncated.
    """
    index = read_indexes(train)[0]
    for name, folder in named.items():
        field = f"data.valid.{name}"
        _check_same_tokens(field, folder, read_index(folder, field), train[0], index)
    return {name: Corpus.open([folder], "all", seq_len, f"data.valid.{name}") for name, folder in named.items()}


def _check_same_tokens(
    field: str, folder: str | Path, index: CorpusIndex, train: str | Path, train_index: CorpusIndex
) -> None:
    if not same_tokens(index, train_index):
        raise InputError(
            f"{field}: {folder}: its tokenizer is not that of data.train[0]; prepare it again with "
            f"{tokenizer_option(train, train_index)}"
        )


def _map_shard(folder: Path, number: int, index: CorpusIndex) -> NDArray[np.unsignedinteger]:
    shard = index.shards[number]
    path = folder / shard.file
    dtype = np.dtype(index.dtype).newbyteorder("<")
    expected = shard.tokens * dtype.itemsize
    try:
        size = path.stat().st_size
        if size == expected:
            return np.memmap(path, dtype=dtype, mode="r")
        text = f"{shard.file} has {size} bytes, expected {expected}; prepare the folder again"
    except OSError as error:
        text = f"{shard.file}: cannot read: {error.strerror}; prepare the folder again"
    raise FileError(folder / INDEX_NAME, [FieldError(f"shards[{number}]", text)])


def sample(seed: int, index: NDArray[np.int64], windows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the epochs and the windows of samples.

    Args:
        seed: the run's seed.
        index: numbers of samples in the run, [n]; the first sample of the run is 0.
        windows: number of windows in the corpus, at least 1.

    Returns:
        Two int64 arrays of shape [n]: the epoch of each sample, from 0, and its window. Over a whole epoch, each window
            in [0, windows) comes exactly once.

    Raises:
        ValueError: `windows` is less than 1.
    """
    if windows < 1:
        raise ValueError(f"windows: found {windows}, at least 1 is needed")
    epoch = index // windows
    return epoch, permuted(seed, epoch, index % windows, windows)


def permuted(seed: int, epoch: NDArray[np.int64], position: NDArray[np.int64], windows: int) -> NDArray[np.int64]:
    """Return the window at each position of its epoch's permutation, [n].

    Args:
        epoch: epoch of each element, from 0, [n].
        position: position of each element in its epoch, in [0, windows), [n].
        windows: number of windows in the corpus.
    """
    # Equal halves need a power of four, so at most three quarters of the domain lie outside the range.
    half_bits = max(1, ((windows - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    value = _feistel(position.astype(np.uint64), keys, half_bits)
    outside = np.flatnonzero(value >= windows)
    while outside.size:
        # The network permutes its domain, so walking on from a point in the range must return to the range.
        value[outside] = _feistel(value[outside], keys[:, outside], half_bits)
        outside = outside[value[outside] >= windows]
    return value.astype(np.int64)


def _feistel(value: UInt64, keys: UInt64, half_bits: int) -> UInt64:
    """Return each value after one pass through the balanced Feistel network on numbers of 2·half_bits bits.

    Args:
        keys: a key for each round and value, [ROUNDS, n].
    """
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> np.uint64(half_bits), value & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right ^ key) & mask)
    return (left << np.uint64(half_bits)) | right


def _round_keys(seed: int, epoch: NDArray[np.int64]) -> UInt64:
    """Return keys of the Feistel network, [ROUNDS, n]: for each of n epochs, a hash of seed, epoch and round."""
    base = splitmix64(splitmix64(np.full(epoch.shape, seed % 2**64, dtype=np.uint64)) ^ epoch.astype(np.uint64))
    rounds = np.arange(1, ROUNDS + 1, dtype=np.uint64)[:, None]
    return splitmix64(base[None, :] + rounds * _GOLDEN)


def splitmix64(value: UInt64) -> UInt64:
    """Return a hash of each number: one step of SplitMix64, with that number as the state, in uint64 arithmetic that
    wraps around."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
