"""A Hugging Face folder on disk, from which a run may start: its config.json, and where each tensor is in its files.

The header of each safetensors file is checked before any tensor is read. Such a file has 8 bytes with the length of a
JSON header; the header with type, shape and offsets of each tensor; then the tensors, one after the other without holes
(https://github.com/huggingface/safetensors#format). The module needs no torch, because the folder is checked before a
job is queued.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.base.json_text import JsonError, parse_json
from hpctrain.corpus.prepare.tokenizer import TOKENIZER_NAME, read_tokenizer
from hpctrain.corpus.read.tokens import describe_tokenizer, read_indexes
from hpctrain.hf.architecture import Architecture
from hpctrain.hf.config import CONFIG_NAME, architecture, dropout_of
from hpctrain.hf.config_keys import ConfigKeys, short_repr
from hpctrain.hf.tensors import INDEX, SINGLE, HfTensor
from hpctrain.hf.tokenizer import byte_tokenizer
from hpctrain.records.format.document import read_json
from hpctrain.records.format.file_name import plain_name_in
from hpctrain.records.format.input_file import open_input
from hpctrain.records.model.families import FamilySpec
from hpctrain.records.model.hf_model import HfModel
from hpctrain.records.model.transformers_spec import TransformersSpec
from hpctrain.records.run.run import Run

READABLE = ("F32", "F16", "BF16", "F64")
_SAVED_TOGETHER = "take config.json and weights from one save_pretrained"
"""What to do about weights that do not fit config.json."""
_CHUNK = 1 << 20
"""Bytes that are read at a time when two tensors are compared."""
_SAMPLE = 1024
"""Number of bytes at the beginning of each tensor that are hashed, to distinguish weights of equal shapes."""


_HEADER_LIMIT = 100_000_000
"""Largest header that the safetensors format allows, in bytes."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Type in a safetensors header -> bits of a number of that type."""
_SIZE_MAX = 2**62


@dataclass(frozen=True)
class StoredTensor:
    """Name, type, shape and position of one tensor in a safetensors file; `size_bytes` is its length there."""

    file: Path
    name: str
    """Name of the tensor in the file. In files of early versions of transformers, it may differ from today's name."""
    dtype: str
    """Type of the numbers as safetensors names it, such as 'BF16'."""
    shape: tuple[int, ...]
    begin: int
    """Offset of the tensor's first byte from the beginning of the file."""
    size_bytes: int


Fallback = Callable[[FileError], HfModel]
"""Function that reads a folder whose config.json hpctrain's own families refuse; its argument is their error."""


def with_hf_folder(run: Run, fallback: Fallback | None = None) -> Run:
    """Return the run with what the Hugging Face folder at `model.hf` says as `model.found`: config, dimensions and
    weights hash. A run without `model.hf`, or with `model.found` already, is returned unchanged.

    Args:
        fallback: reads a folder whose config.json is of none of hpctrain's own families; None: it is refused.

    Raises:
        InputError: the folder is missing or has no safetensors files, or its tokenizer differs from that of the data.
        FileError: a file of the folder or the data's index.json is damaged, or hpctrain does not support the model.
    """
    if run.model.hf is None or run.model.hf_model is not None:
        return run
    folder = Path(run.model.hf)
    hf_model = read_folder(folder, fallback)
    _check_tokenizer(run, folder)
    return run.model_copy(update={"model": run.model.model_copy(update={"hf_model": hf_model})})


def hf_warnings(run: Run) -> list[str]:
    """Return warnings about the model in the run's Hugging Face folder; [] without a folder.

    A model that transformers builds lacks some of hpctrain's features. Any other model is trained without dropout, also
    where transformers would use it.
    """
    if run.model.hf_model is None:
        return []
    spec = run.model.hf_model.dims
    if isinstance(spec, TransformersSpec):
        return [
            f"model.hf: transformers builds this model, a {spec.architecture} ({spec.because}): without tensor and "
            "sequence parallelism, with weights gathered in fp32, and with sizes that were measured on this machine; "
            "every node needs transformers"
        ]
    dropout = dropout_of(run.model.hf_model.config)
    text = f"model.hf: transformers would train this model with {', '.join(dropout)}; models here have no dropout"
    return [text] * bool(dropout)


def _check_tokenizer(run: Run, folder: Path) -> None:
    """Check that every token of the data has the same id in the tokenizer of the Hugging Face folder. With other ids,
    what the model has learned would be of no use. A folder without a tokenizer is not checked.

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
        theirs = next((repr(text) for text, token in known.items() if token == number), "nothing")
        raise InputError(
            f"model.hf: {folder}: the data was made with another tokenizer ({describe_tokenizer(index)}): its token "
            f"{number} is {text!r}, the model's {theirs}; prepare it again with --tokenizer {path}"
        )


def _vocabulary(path: Path, field: str) -> dict[str, int]:
    vocabulary: dict[str, int] = read_tokenizer(path, field).get_vocab(with_added_tokens=True)
    return vocabulary


def read_folder(path: Path, fallback: Fallback | None = None) -> HfModel:
    """Return the config, dimensions and weights hash of a Hugging Face folder, after the check that it has all tensors
    of the model.

    Args:
        fallback: reads a folder whose config.json is of none of hpctrain's own families; None: it is refused.

    Raises:
        InputError: the folder does not exist, or has no safetensors files.
        FileError: a file is damaged, hpctrain does not support the model in config.json, or tensors are missing,
            unknown, or of other shapes or types.
    """
    if not (path / CONFIG_NAME).is_file():
        missing = f"has no {CONFIG_NAME}" if path.is_dir() else "no such folder"
        raise InputError(f"model.hf: {path}: {missing}; name one with config.json and safetensors files in it")
    config, source = read_config(path), str(path / CONFIG_NAME)
    try:
        row = architecture(config, source)
        spec = row.read(ConfigKeys(config, source))
    except FileError as error:
        if fallback is None:
            raise
        return fallback(error)
    stored = stored_tensors(path, row)
    _check(path, spec, row, stored)
    return HfModel(config=config, dims=spec, weights_sha256=weights_sha256(stored))


def read_config(path: Path) -> dict[str, Any]:
    """Return the values of the config.json in a Hugging Face folder.

    Raises:
        FileError: the file is missing, is no JSON or has no keys.
    """
    config = read_json(path / CONFIG_NAME)
    if not isinstance(config, dict):
        raise FileError(path / CONFIG_NAME, [FieldError("", "found no keys; name the folder of a model")])
    return config


def stored_tensors(path: Path, row: Architecture) -> dict[str, StoredTensor]:
    """Return name -> tensor for all tensors of a Hugging Face folder, under the names that transformers gives them
    today.

    Raises:
        InputError: the folder has no safetensors files.
        FileError: a file is damaged or missing.
    """
    return {row.current_name(item.name): item for item in safetensors_in(path)}


def safetensors_in(path: Path) -> list[StoredTensor]:
    """Return all tensors of a Hugging Face folder, under their names in its files.

    Raises:
        InputError: the folder has no safetensors files.
        FileError: a file is damaged or missing.
    """
    return [item for file in _shard_files(path) for item in tensors_in(file)]


def find_stored(tensor: HfTensor, stored: dict[str, StoredTensor]) -> StoredTensor | None:
    """Return the stored tensor with the name of `tensor`, else the first with one of its other names (`instead`); None
    if there is none."""
    return next((stored[name] for name in (tensor.name, *tensor.instead) if name in stored), None)


def have_same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two stored tensors have the same type, shape and bytes. Tensors that differ are read only up to
    the first difference.

    Raises:
        FileError: a file is missing or cannot be read.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with os.fdopen(open_input(one.file), "rb") as first, os.fdopen(open_input(other.file), "rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        sizes = (min(_CHUNK, one.size_bytes - done) for done in range(0, one.size_bytes, _CHUNK))
        return all(first.read(size) == second.read(size) for size in sizes)


def weights_sha256(stored: dict[str, StoredTensor]) -> str:
    """Return the SHA-256, as hex, of the name, type, shape and first 1,024 bytes of every tensor. A change of later
    bytes goes unnoticed: so little is read that large folders take no time.

    Raises:
        FileError: a file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    for name in sorted(stored, key=lambda name: (stored[name].file, stored[name].begin)):
        item = stored[name]
        digest.update(f"{name} {item.dtype} {item.shape} ".encode())
        with os.fdopen(open_input(item.file), "rb") as file:
            file.seek(item.begin)
            digest.update(file.read(min(_SAMPLE, item.size_bytes)))
    return digest.hexdigest()


def _check(path: Path, spec: FamilySpec, row: Architecture, stored: dict[str, StoredTensor]) -> None:
    mistakes: list[FieldError] = []
    tensors = list(row.tensors(spec))
    known = {tensor.name for tensor in tensors}
    copies = {name: tensor.name for tensor in tensors for name in tensor.instead if name not in known}
    for tensor in tensors:
        place = find_stored(tensor, stored)
        if place is None:
            text = f"no such tensor; config.json says it has shape {list(tensor.shape)}; {_SAVED_TOGETHER}"
            mistakes.append(FieldError(tensor.name, text))
        elif place.shape != tensor.shape:
            text = f"found shape {list(place.shape)}; config.json says {list(tensor.shape)}; {_SAVED_TOGETHER}"
            mistakes.append(FieldError(tensor.name, text))
        elif place.dtype not in READABLE:
            text = f"found numbers of type {place.dtype}; allowed: {', '.join(READABLE)}; save the model in one of them"
            mistakes.append(FieldError(tensor.name, text))
    for name, other in copies.items():
        if {name, other} <= stored.keys() and not have_same_values(stored[name], stored[other]):
            text = f"differs from {other}, but config.json ties the two (tie_word_embeddings); {_SAVED_TOGETHER}"
            mistakes.append(FieldError(name, text))
    strange = [name for name in stored if name not in known and name not in copies and not row.is_ignorable(name)]
    mistakes += [FieldError(name, f"no part of a {row.name} here; name a folder without it") for name in strange]
    if mistakes:
        more = [FieldError("", f"and {len(mistakes) - 8} more tensors like these")] if len(mistakes) > 8 else []
        raise FileError(path, [*mistakes[:8], *more])


def _shard_files(path: Path) -> list[Path]:
    """Return the paths of a Hugging Face folder's safetensors files. If the folder has model.safetensors, the
    index and its files are ignored, as by transformers.

    Raises:
        InputError: the folder has neither model.safetensors nor an index.
        FileError: the index (model.safetensors.index.json) is damaged, or a file that it names is missing.
    """
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if (path / INDEX).is_file():
        index = read_json(path / INDEX)
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            text = f"found {short_repr(names)}; a table of tensors and files is expected; copy the folder again"
            raise FileError(path / INDEX, [FieldError("weight_map", text)])
        shards = sorted(set(names.values()))
        files = [path / plain_name_in(path / INDEX, "weight_map", name, "copy the folder again") for name in shards]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            text = f"{len(missing)} of {len(files)} files are not there, such as {missing[0]}; copy the folder again"
            raise FileError(path / INDEX, [FieldError("weight_map", text)])
        return files
    other = next((file.name for pattern in ("*.safetensors", "*.bin") for file in sorted(path.glob(pattern))), "")
    pickled = ", a pickle, which is never opened" * other.endswith(".bin")
    hint = f" (found {other}{pickled})" * bool(other)
    raise InputError(
        f"model.hf: {path}: has no {SINGLE} and no {INDEX}{hint}; copy the folder again, or write it with "
        "save_pretrained of transformers"
    )


def tensors_in(path: Path) -> list[StoredTensor]:
    """Return the tensors of one safetensors file, in the order of their positions; only the header is read.

    Raises:
        FileError: the file cannot be read, is no safetensors file, or is truncated.
    """
    try:
        with os.fdopen(open_input(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            if first == b"version ":
                raise FileError(
                    path, [FieldError("", "found a pointer of Git LFS, not the weights; run `git lfs pull`")]
                )
            length = int.from_bytes(first, "little")
            if length > min(_HEADER_LIMIT, size - 8):
                raise _error(path, f"not a safetensors file: its header claims {length} bytes, the file has {size}")
            header = file.read(length)
        entries = parse_json(header)
    except OSError as error:
        raise FileError(path, [FieldError("", f"cannot read: {error.strerror}")]) from None
    except JsonError as error:
        raise _error(path, f"not a safetensors file: its header is no JSON ({error})") from None
    if not isinstance(entries, dict):
        raise _error(path, "not a safetensors file: its header has no keys")
    entries.pop("__metadata__", None)
    tensors = [_stored(path, name, entry, 8 + length) for name, entry in entries.items()]
    tensors.sort(key=attrgetter("begin", "size_bytes"))
    end = 8 + length
    for item in tensors:
        if item.begin != end:
            raise _error(path, f"data_offsets begin at byte {item.begin}, expected at {end}", item.name)
        end += item.size_bytes
    if size != end:
        raise _error(path, f"has {size} bytes, its header says {end}")
    return tensors


def _stored(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    """Return the tensor `name` that the entry `entry` of a safetensors header describes.

    Args:
        start: offset in the file at which the tensors begin.

    Raises:
        FileError: the entry has values that the format does not allow.
    """
    values: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = values.get("shape"), values.get("data_offsets"), values.get("dtype")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _error(path, f"found dtype {dtype!r:.60}; allowed: {', '.join(_BITS)}", name)
    if not _are_sizes(shape) or math.prod(shape) > _SIZE_MAX:
        raise _error(path, f"found shape {shape!r:.60}; a list of sizes is expected", name)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(path, f"found data_offsets {offsets!r:.60}; a begin and an end are expected", name)
    expected = -(-math.prod(shape) * _BITS[dtype] // 8)
    if offsets[1] - offsets[0] != expected:
        raise _error(path, f"data_offsets hold {offsets[1] - offsets[0]} bytes, dtype and shape need {expected}", name)
    return StoredTensor(path, name, dtype, tuple(shape), start + offsets[0], expected)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= 32 and all(type(item) is int and item >= 0 for item in value)


def _error(path: Path, text: str, name: str = "") -> FileError:
    return FileError(path, [FieldError(name, f"{text}; copy the folder again")])
