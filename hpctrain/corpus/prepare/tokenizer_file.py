"""Read a foreign tokenizer.json with the `tokenizers` library, which may panic on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import tokenizers

from hpctrain.base.errors import FileError, InputError
from hpctrain.records.format.bounds import TOKENIZER_BYTES, VOCAB_MAX
from hpctrain.records.format.input_file import read_input_text


def read_tokenizer(path: Path, field: str) -> tokenizers.Tokenizer:
    """Read the tokenizer in a file; `field` names the file's place in errors ('--tokenizer', 'model.hf').

    Raises:
        InputError: it is not a regular file, not a tokenizer, or has ids beyond any vocabulary.
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
    """Turn errors of the library into one line that begins with `words`.

    A panic of its Rust code is a BaseException, which `except Exception` would miss.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = " ".join(str(error).split())[:300]
        shown = "".join(c if c.isprintable() else "?" for c in text)
        raise InputError(f"{words}: {shown or type(error).__name__}; give another file") from None
