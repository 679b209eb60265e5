"""Converts text to tokens: one for each byte, or by a tokenizer of the `tokenizers` library, which is trained on the
corpus (byte-level BPE) or read from a tokenizer.json."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from hpctrain.base.atomic import write_text
from hpctrain.base.errors import FileError, InputError
from hpctrain.records.corpus import TokenizerInfo
from hpctrain.records.format.document import TOKENIZER_BYTES, VOCAB_MAX
from hpctrain.records.format.input_file import read_input_text

TOKENIZER_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
"""Names of the end-of-document token in published tokenizers; of these, the first one that a tokenizer has is used."""
TRAINED_RANGE = (257, 32_768)
"""Smallest and largest vocabulary that can be trained: 256 bytes and the end-of-document token, to 2^15."""

Tokens = NDArray[np.int64]


class ByteTokenizer:
    """A tokenizer with one token for each UTF-8 byte, whose id is the byte; token 256 ends a document."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, without tokens for its begin or end."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def save(self, folder: Path) -> TokenizerInfo:
        """Return the tokenizer's entry for the index. Nothing is written, because this tokenizer needs no file."""
        return TokenizerInfo(kind="bytes", end_of_text=self.end_of_text)


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, which is stored with the corpus as tokenizer.json."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, kind: Literal["trained", "given"], end_of_text: int) -> None:
        self._tokenizer = tokenizer
        self._kind: Literal["trained", "given"] = kind
        self.end_of_text = end_of_text
        self._end: str = tokenizer.id_to_token(end_of_text) or END_OF_TEXT
        # Ids may have gaps, so the size is the largest id plus one.
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, without tokens for its begin or end. The name of the end-of-document token
        within a text is encoded like other text, not as that token.

        Raises:
            InputError: the `tokenizers` library cannot encode a text.
        """
        pieces = [self._pieces(text) for text in texts]
        flat = [piece for text_pieces in pieces for piece in text_pieces]
        with library_errors("--tokenizer: the tokenizers library cannot turn this text into tokens"):
            encoded = self._tokenizer.encode_batch_fast(flat, add_special_tokens=False)
        ids = (np.array(item.ids, dtype=np.int64) for item in encoded)
        return [np.concatenate([next(ids) for _ in text_pieces]) for text_pieces in pieces]

    def _pieces(self, text: str) -> list[str]:
        """Return the text in pieces, which are encoded one by one. Where the text contains the name of the
        end-of-document token, a piece ends after the name's first letter, so that the name does not become that
        token."""
        parts = text.split(self._end)
        if len(parts) == 1:
            return parts
        first, rest = self._end[:1], self._end[1:]
        return [parts[0] + first, *(rest + part + first for part in parts[1:-1]), rest + parts[-1]]

    def save(self, folder: Path) -> TokenizerInfo:
        """Write the tokenizer as tokenizer.json into the folder, and return its entry for the index.

        Raises:
            StorageError: the file cannot be written.
        """
        text = self._tokenizer.to_str(pretty=True)
        write_text(folder / TOKENIZER_NAME, text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return TokenizerInfo(kind=self._kind, end_of_text=self.end_of_text, file=TOKENIZER_NAME, sha256=digest)


Tokenizer = ByteTokenizer | FileTokenizer


def trained_size(choice: str) -> int | None:
    """Return N if `choice` is 'train:N' (train a tokenizer with N tokens); None for another choice.

    Raises:
        InputError: N is not a number, or is outside TRAINED_RANGE.
    """
    if not choice.startswith("train:"):
        return None
    text = choice.removeprefix("train:")
    low, high = TRAINED_RANGE
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise InputError(f"--tokenizer {choice}: found {text!r} after train:, allowed: a number from {low} to {high}")
    return int(text)


def train_tokenizer(size: int, texts: Iterable[str]) -> FileTokenizer:
    """Return a byte-level BPE tokenizer of at most `size` tokens, trained on the texts (BPE: Sennrich et al. 2016; on
    bytes: Radford et al. 2019).

    The same texts, in the same order, give the same tokenizer.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return FileTokenizer(tokenizer, "trained", tokenizer.get_vocab(with_added_tokens=True)[END_OF_TEXT])


def load_tokenizer(choice: str) -> Tokenizer:
    """Return the tokenizer that `choice` names: 'bytes' (one token a byte), or the path of a tokenizer.json.

    Raises:
        InputError: the file does not exist, is not a tokenizer, or has no end-of-document token.
    """
    if choice == "bytes":
        return ByteTokenizer()
    path = Path(choice)
    if not path.is_file():
        raise InputError(
            f"--tokenizer {choice}: no such file; allowed: bytes, train:N, or the path of a tokenizer.json"
        )
    tokenizer = read_tokenizer(path, "--tokenizer")
    # A corpus is one long text: truncation would lose tokens, and padding would invent some.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ends = [number for number in map(tokenizer.token_to_id, KNOWN_ENDS) if number is not None]
    if not ends:
        raise InputError(f"--tokenizer {choice}: has no token that ends a document; looked for {', '.join(KNOWN_ENDS)}")
    return FileTokenizer(tokenizer, "given", ends[0])


def read_tokenizer(path: Path, field: str) -> tokenizers.Tokenizer:
    """Return the tokenizer in a file.

    Args:
        field: option or key that names the file, for errors: '--tokenizer', 'model.hf'.

    Raises:
        InputError: the file is not regular, not a tokenizer, or has token ids of VOCAB_MAX or above.
    """
    try:
        text = read_input_text(path, TOKENIZER_BYTES)
    except FileError as error:
        raise InputError(f"{field}: {path}: {error.mistakes[0].text}") from None
    with library_errors(f"{field}: {path}: not a tokenizer.json of the tokenizers library"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= VOCAB_MAX:
        raise InputError(f"{field}: {path}: found a token with the id {largest}, allowed: below {VOCAB_MAX}")
    return tokenizer


@contextlib.contextmanager
def library_errors(words: str) -> Iterator[None]:
    """Turn errors of the `tokenizers` library in the `with` block into an InputError of one line that begins with
    `words`.

    Panics of the library's Rust code are included: a panic is a BaseException, which `except Exception` would miss.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = " ".join(str(error).split())[:300]
        shown = "".join(c if c.isprintable() else "?" for c in text)
        raise InputError(f"{words}: {shown or type(error).__name__}; give another file") from None
