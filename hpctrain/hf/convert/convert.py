"""Makes a Hugging Face folder of a checkpoint of another tool, from which a run may start (`model.hf`)."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import write_bytes, write_json
from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.base.system.disk_space import check_disk_space
from hpctrain.corpus.prepare.tokenizer import TOKENIZER_NAME
from hpctrain.hf.config import CONFIG_NAME, architecture_of
from hpctrain.hf.convert import megatron, torchtitan, transformers_names
from hpctrain.hf.convert.dcp_folder import METADATA, tensors_of_dcp
from hpctrain.hf.convert.layout import ModelLayout, model_tensors, size
from hpctrain.hf.convert.megatron_ranks import arguments_in, is_megatron_ranks, tensors_of_ranks
from hpctrain.hf.convert.torch_file import LazyTensor, TorchFile
from hpctrain.hf.convert.write import write_safetensors
from hpctrain.hf.folder import read_folder
from hpctrain.hf.output import check_output, made_whole
from hpctrain.hf.safetensors_layout import DTYPES, lay_out
from hpctrain.hf.source_settings import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER_CONFIG
from hpctrain.hf.tensors import INDEX, HfTensor, assign_to_shards, index_of
from hpctrain.records.format.document import read_json
from hpctrain.records.format.input_file import read_input
from hpctrain.records.format.yaml_file import apply_overrides

_MEGATRON_COMMON = "common.pt"
_TOKENIZER_FILES = (
    TOKENIZER_NAME, TOKENIZER_CONFIG, "special_tokens_map.json", GENERATION_CONFIG, CHAT_TEMPLATE
)  # fmt: skip
_TOKENIZER_BYTES = 256 * 2**20
_NAMES = {stored: name for name, stored in DTYPES.items()}
"""Type of numbers in a safetensors file -> torch's name of it."""


@dataclass(frozen=True)
class ConvertResult:
    """Summary of a converted checkpoint."""

    tool: str
    """The tool whose names the tensors of the checkpoint have, in words, such as "Megatron's GPT"."""
    architecture: str
    """Name of transformers' class for the model."""
    files: list[str]
    """Names of the files in the folder, sorted."""
    size_bytes: int
    """Bytes of all files together."""
    parameters: int
    """Count of the numbers in all tensors."""


def convert(
    source: Path, output: Path, config_file: Path | None, overrides: tuple[str, ...], shard_bytes: int, force: bool
) -> ConvertResult:
    """Make a Hugging Face folder of a checkpoint, and return a summary of the folder. The numbers keep their type, and
    no bit of them changes.

    Args:
        source: folder of the checkpoint.
        output: folder to make.
        config_file: config.json of the model; None: that of `source`, if it has one.
        overrides: texts 'key=value' that set keys of config.json, as given by `--set`.
        shard_bytes: most bytes of a file with tensors; a larger tensor gets a larger file of its own.
        force: whether to replace an existing model folder.

    Raises:
        InputError: the checkpoint is missing, keys of config.json are missing, an override is no 'key=value', a tensor
            does not fit into memory, or `output` may not be replaced (`check_output`).
        FileError: a file of the checkpoint, `config_file` or a tokenizer file beside it is damaged, the checkpoint is
            of no known tool or contradicts config.json, or the model is none that hpctrain trains.
        StorageError: there is no space, or the folder cannot be written.
    """
    output = output.resolve()
    check_output(output, force)
    layout = _layout(source)
    if config_file is None and os.path.lexists(source / CONFIG_NAME):
        config_file = source / CONFIG_NAME
    config = _config(layout, source, config_file, overrides)
    tensors = layout.tensors(config)
    config.pop("dtype", None)  # the same in transformers 5
    config["torch_dtype"] = _NAMES[next(iter(tensors.values())).dtype]
    number_bytes = max(tensor.number_bytes for tensor in tensors.values())
    shapes = [HfTensor(name, tensor.shape, ()) for name, tensor in tensors.items()]
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    files = assign_to_shards(shapes, number_bytes, shard_bytes)
    with made_whole(output, force) as made:
        tensors_bytes = sum(tensor.size_bytes for tensor in tensors.values())
        check_disk_space(made, tensors_bytes, "the converted model", len(files))
        write_json(made / CONFIG_NAME, config)
        if config_file is not None:
            _copy_tokenizer(config_file.parent, made)
        for name, group in files.items():
            write_safetensors(made / name, lay_out(name, group, dtypes), tensors)
        if len(files) > 1:
            write_json(made / INDEX, index_of(files, tensors_bytes))
        try:
            model = read_folder(made)
        except FileError as error:
            raise FileError(source, error.mistakes) from None
        names = sorted(path.name for path in made.iterdir())
        size_bytes = sum((made / name).stat().st_size for name in names)
    parameters = sum(tensor.count for tensor in shapes)
    return ConvertResult(layout.tool, architecture_of(model).name, names, size_bytes, parameters)


def _layout(source: Path) -> ModelLayout:
    """Return the layout of the checkpoint in the folder `source`, which the names of its tensors tell.

    Raises:
        InputError: the folder holds no checkpoint.
        FileError: a file of the checkpoint is damaged, or its tensors are of no known tool.
    """
    arguments: dict[str, Any] = {}
    tensors: dict[str, LazyTensor]
    if (source / METADATA).exists():
        tensors = tensors_of_dcp(source)
        if (source / _MEGATRON_COMMON).exists():
            arguments = arguments_in(TorchFile(source / _MEGATRON_COMMON).value())
    elif is_megatron_ranks(source):
        tensors, arguments = tensors_of_ranks(source)
    else:
        raise InputError(f"{source}: found no checkpoint; {_hint(source)}")
    if (model := model_tensors(source, tensors, megatron.KNOWN)) is not None:
        return megatron.MegatronLayout(model, arguments)
    if (model := model_tensors(source, tensors, torchtitan.KNOWN)) is not None:
        return torchtitan.TorchtitanLayout(model)
    for known in transformers_names.KNOWN:
        if (model := model_tensors(source, tensors, known)) is not None:
            return transformers_names.TransformersLayout(model)
    names = (megatron.KNOWN, torchtitan.KNOWN, *transformers_names.KNOWN)
    text = f"found {len(tensors)} tensors, and no embedding of a known name; allowed: {', '.join(names)}"
    raise FileError(source, [FieldError("", text)])


def _hint(source: Path) -> str:
    """Return the end of the error message about a path that is no checkpoint: which path to give instead."""
    if not source.is_dir():
        return "name the folder of one"
    inside: list[Path] = []
    with contextlib.suppress(OSError):  # then the message names no folder
        inside += [
            path
            for path in source.iterdir()
            if (path / METADATA).exists() or (path.is_dir() and is_megatron_ranks(path))
        ]
    if inside:
        return f"name one of the folders in it, such as {max(inside, key=lambda path: path.stat().st_mtime).name}"
    return f"a folder with {METADATA} (torch DCP, torchtitan, Megatron) or with mp_rank_00 (Megatron) is expected"


def _config(layout: ModelLayout, source: Path, file: Path | None, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return all keys of config.json: those that the user gave, and those that the checkpoint tells.

    Raises:
        InputError: keys are missing, or an override is no 'key=value'.
        FileError: `file` is damaged, or the checkpoint contradicts a key that the user gave.
    """
    given: Any = {} if file is None else read_json(file)
    if not isinstance(given, dict):
        raise FileError(str(file), [FieldError("", "found no keys; name the config.json of a model")])
    given = apply_overrides(given, overrides)
    _check_json(given, source)
    derived = layout.config(given)
    _check_json(derived, source)
    place = "--set" if file is None else f"{file} or --set"
    wrong = [
        FieldError(key, f"found {value!r:.60}; {place} says {given[key]!r:.60}")
        for key, value in derived.items()
        if key in given and given[key] != value and not (key in layout.may_shrink and _is_smaller(given[key], value))
    ]
    if wrong:
        raise FileError(source, wrong)
    config = {**derived, **given}
    if config.get("max_position_embeddings") is not None:
        size(config, "max_position_embeddings", source)
    missing = [key for key in layout.needed if key not in config and not _is_in_rope_parameters(config, key)]
    if missing:
        words = " ".join(f"--set {key}=…" for key in missing)
        raise InputError(
            f"{source}: {layout.tool}: the checkpoint does not say {', '.join(missing)}; add --config with the model's "
            f"config.json, or {words}"
        )
    return config


def _check_json(config: dict[str, Any], source: Path) -> None:
    """Check that a file of JSON can hold the values.

    Raises:
        FileError: it cannot hold some, as numbers that are not finite.
    """
    wrong = []
    for key, value in config.items():
        try:
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, RecursionError):
            wrong.append(FieldError(key, "no value of a config.json; finite numbers, text, lists and keys are allowed"))
    if wrong:
        raise FileError(source, wrong)


def _is_smaller(vocabulary: Any, rows: int) -> bool:
    """Return whether a given vocabulary is smaller than the embedding, to which Megatron adds rows."""
    return type(vocabulary) is int and 0 < vocabulary < rows


def _is_in_rope_parameters(config: dict[str, Any], key: str) -> bool:
    """Return whether a key of the rotary positions is given in the form of transformers 5."""
    return key in ("rope_theta", "rope_scaling") and isinstance(config.get("rope_parameters"), dict)


def _copy_tokenizer(folder: Path, made: Path) -> None:
    for name in _TOKENIZER_FILES:
        if os.path.lexists(folder / name):
            write_bytes(made / name, read_input(folder / name, _TOKENIZER_BYTES))
