"""A Hugging Face folder on disk: its config.json, and where each tensor is in its safetensors files.

Needs no torch, because the folder is checked before a job is queued.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.hf.config import CONFIG_NAME, spec_of
from hpctrain.hf.safetensors_header import StoredTensor, tensors_in
from hpctrain.hf.tensors import HfTensor, current_tensor_name, is_ignorable, tensors_of
from hpctrain.records.format.document import read_json
from hpctrain.records.format.file_name import plain_name_in
from hpctrain.records.format.input_file import open_input
from hpctrain.records.model.families import FamilySpec, HfModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = ("F32", "F16", "BF16", "F64")
_SAMPLE = 1024
"""Number of first bytes of each tensor that are hashed, to distinguish weights of equal shapes."""


def read_folder(path: Path) -> HfModel:
    """Return the config, dimensions and weights hash of a folder, after checking that it has all tensors of the model.

    Raises:
        InputError: the folder does not exist, or has no safetensors files.
        FileError: the model in config.json is not supported, or tensors are missing, unknown or of other shapes.
    """
    if not path.is_dir():
        raise InputError(f"model.hf: {path}: no such folder; name one with config.json and safetensors files in it")
    config = read_json(path / CONFIG_NAME)
    if not isinstance(config, dict):
        raise FileError(path / CONFIG_NAME, [FieldError("", "found no keys; name the folder of a model")])
    spec = spec_of(config, str(path / CONFIG_NAME))
    stored = stored_tensors(path, spec)
    _check(path, spec, stored)
    return HfModel(config=config, dims=spec, weights_sha256=weights_sha256(stored))


def stored_tensors(path: Path, spec: FamilySpec) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by their current names in transformers.

    Raises:
        InputError, FileError: the folder has no tensors, or a file is damaged.
    """
    return {current_tensor_name(spec, item.name): item for file in _shard_files(path) for item in tensors_in(file)}


def find_stored(tensor: HfTensor, stored: dict[str, StoredTensor]) -> StoredTensor | None:
    """Return the stored tensor of that name, else of its alternative name; None where neither exists."""
    return stored.get(tensor.name) or (stored.get(tensor.instead) if tensor.instead else None)


def weights_sha256(stored: dict[str, StoredTensor]) -> str:
    """Return the SHA-256 of the name, dtype, shape and first 1,024 bytes of every tensor. About a thousandth of the
    folder is read, so a change further into a tensor goes unnoticed."""
    digest = hashlib.sha256()
    for name in sorted(stored, key=lambda name: (stored[name].file, stored[name].begin)):
        item = stored[name]
        digest.update(f"{name} {item.dtype} {item.shape} ".encode())
        with os.fdopen(open_input(item.file), "rb") as file:
            file.seek(item.begin)
            digest.update(file.read(min(_SAMPLE, item.size_bytes)))
    return digest.hexdigest()


def _check(path: Path, spec: FamilySpec, stored: dict[str, StoredTensor]) -> None:
    mistakes: list[FieldError] = []
    known: set[str] = set()
    for tensor in tensors_of(spec):
        known.add(tensor.name)
        place = find_stored(tensor, stored)
        if place is None:
            mistakes.append(
                FieldError(tensor.name, f"no such tensor; config.json says it has shape {list(tensor.shape)}")
            )
        elif place.shape != tensor.shape:
            text = f"found shape {list(place.shape)}; config.json says {list(tensor.shape)}"
            mistakes.append(FieldError(tensor.name, text))
        elif place.dtype not in READABLE:
            text = f"found numbers of type {place.dtype}; allowed: {', '.join(READABLE)}; save the model in one of them"
            mistakes.append(FieldError(tensor.name, text))
    strange = [name for name in stored if name not in known and not is_ignorable(spec, name)]
    mistakes += [FieldError(name, f"no part of a {spec.family} here; name a folder without it") for name in strange]
    if mistakes:
        more = [FieldError("", f"{len(mistakes) - 8} tensors more are wrong")] if len(mistakes) > 8 else []
        raise FileError(path, [*mistakes[:8], *more])


def _shard_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder."""
    if (path / INDEX).is_file():
        index = read_json(path / INDEX)
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise FileError(path / INDEX, [FieldError("weight_map", "not a table of tensors and files of this folder")])
        shards = sorted(set(names.values()))
        files = [path / plain_name_in(path / INDEX, "weight_map", name, "copy the folder again") for name in shards]
    else:
        files = [path / SINGLE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        pickled = next(path.glob("*.bin"), None)
        hint = (
            f" ({pickled.name} is a pickle, which is not opened: save_pretrained writes safetensors)" if pickled else ""
        )
        raise InputError(f"model.hf: {path}: has no {missing[0]}{hint}")
    return files
