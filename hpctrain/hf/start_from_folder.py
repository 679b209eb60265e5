"""Starting a run from a Hugging Face folder, which is checked together with the data before anything starts."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.corpus.prepare.tokenizer import TOKENIZER_NAME, read_tokenizer
from hpctrain.corpus.read.index import describe_tokenizer, read_indexes
from hpctrain.hf.config import dropout_of
from hpctrain.hf.folder import read_folder
from hpctrain.hf.tokenizer import byte_tokenizer
from hpctrain.records.run.run import Run


def with_hf_folder(run: Run) -> Run:
    """Return the run with the content of the folder at `model.hf` as `model.found`; a run file that has it already is
    not changed.

    Raises:
        InputError, FileError: the folder cannot be used, or its tokenizer differs from that of the data.
    """
    if run.model.hf is None or run.model.hf_model is not None:
        return run
    folder = Path(run.model.hf)
    hf_model = read_folder(folder)
    _check_tokenizer(run, folder)
    return run.model_copy(update={"model": run.model.model_copy(update={"hf_model": hf_model})})


def dropout_warning(run: Run) -> list[str]:
    """Return a warning where the folder's model was trained with dropout, which hpctrain does not use."""
    if run.model.hf_model is None:
        return []
    dropout = dropout_of(run.model.hf_model.config)
    return [f"model.hf: the folder's config.json has {', '.join(dropout)}; models here have no dropout"] * bool(dropout)


def _check_tokenizer(run: Run, folder: Path) -> None:
    """Check that data and model use the same tokenizer; with another one, all that the model has learned is lost.

    Raises:
        InputError: the tokenizers differ.
    """
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        return
    home = Path(run.data.train_folders[0])
    index = read_indexes(run.data.train_folders)[0]
    known = _vocabulary(path, "model.hf")
    file = index.tokenizer.file
    held = _vocabulary(home / file, "data.train[0]") if file else byte_tokenizer().get_vocab(with_added_tokens=True)
    other = min(((number, text) for text, number in held.items() if known.get(text) != number), default=None)
    if other is not None:
        number, text = other
        raise InputError(
            f"model.hf: {folder}: the data was made with another tokenizer ({describe_tokenizer(index)}): its token "
            f"{number} is {text!r}, the model's {_token_text(known, number)}; prepare it again with --tokenizer {path}"
        )


def _token_text(vocabulary: dict[str, int], number: int) -> str:
    return next((repr(text) for text, token in vocabulary.items() if token == number), "nothing")


def _vocabulary(path: Path, field: str) -> dict[str, int]:
    vocabulary: dict[str, int] = read_tokenizer(path, field).get_vocab(with_added_tokens=True)
    return vocabulary
