"""Reads Megatron's older checkpoints: a file `mp_rank_TT[_PPP]/model_optim_rng.pt` for each rank of tensor and pipeline
parallelism. The pickles in them are read as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.hf.convert.layout import changed, concatenated
from hpctrain.hf.convert.pickle_data import PickledObject
from hpctrain.hf.convert.torch_file import LazyTensor, TorchFile

_FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3}))?")
_FILE = "model_optim_rng.pt"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_ROWS = re.compile(r"(^embedding\.word_embeddings|^output_layer|\.linear_qkv)\.(weight|bias)$")
_COLUMNS = re.compile(r"\.(linear_proj|linear_fc2)\.weight$")
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")


def is_megatron_ranks(folder: Path) -> bool:
    """Whether the folder is an older Megatron checkpoint, with folders `mp_rank_…`."""
    return any(_FOLDER.fullmatch(path.name) for path in folder.glob("mp_rank_*"))


def tensors_of_ranks(folder: Path) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Return the model's tensors by name, each joined of the parts of all ranks, and Megatron-LM's arguments.

    Raises:
        InputError: a file of a rank is missing.
        FileError: a file is damaged, or of Megatron before Megatron-Core.
    """
    places = sorted((path.name, match) for path in folder.iterdir() if (match := _FOLDER.fullmatch(path.name)))
    ranks = {(int(match[2] or 0), int(match[1])): folder / name / _FILE for name, match in places}
    stages, parts = (1 + max(rank[axis] for rank in ranks) for axis in (0, 1))
    for stage in range(stages):
        for part in range(parts):
            if (stage, part) not in ranks:
                name = f"mp_rank_{part:02d}" + (f"_{stage:03d}" if stages > 1 else "")
                raise InputError(f"{folder}: has no {name}; copy the files of all ranks into it")
    tensors: dict[str, LazyTensor] = {}
    arguments: dict[str, Any] = {}
    first_layer = 0
    for stage in range(stages):
        held = []
        for part in range(parts):
            model, arguments = _rank(ranks[stage, part])
            held.append(model)
        layers = {int(match[1]) for name in held[0] if (match := _LAYER.match(name))}
        for name in held[0]:
            match = _LAYER.match(name)
            whole = f"decoder.layers.{first_layer + int(match[1])}.{match[2]}" if match else name
            tensors.setdefault(whole, _whole(ranks[stage, 0], name, held))
        first_layer += len(layers)
    return tensors, arguments


def arguments_in(value: Any) -> dict[str, Any]:
    """Return Megatron-LM's arguments in what a checkpoint saved; an empty dict if there are none. Arguments that are no
    plain values are left out."""
    args = value.get("args") if isinstance(value, dict) else None
    state = args.state if isinstance(args, PickledObject) else None
    if not isinstance(state, dict):
        return {}
    return {name: item for name, item in state.items() if item is None or isinstance(item, bool | int | float | str)}


def _rank(path: Path) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    file = TorchFile(path)
    value = file.value()
    model = value.get("model") if isinstance(value, dict) else None
    if not isinstance(model, dict) or "language_model" in model:
        keys = sorted(key for key in value if isinstance(key, str))[:8] if isinstance(value, dict) else "no dict"
        text = f"found {keys}; a model of Megatron-Core under 'model' is expected: convert it with Megatron-LM first"
        raise FileError(path, [FieldError("model", text)])
    tensors = {
        name: file.tensor(item, name)
        for name, item in model.items()
        if isinstance(name, str) and isinstance(item, PickledObject) and item.name.startswith("torch._utils._rebuild")
    }
    return tensors, arguments_in(value)


def _whole(path: Path, name: str, held: list[dict[str, LazyTensor]]) -> LazyTensor:
    """Return a tensor joined of its parts on the ranks of tensor parallelism.

    Args:
        path: file of the first rank, for errors.
        held: name -> part of the tensor, for each rank.
    """
    if any(name not in rank or rank[name].shape != held[0][name].shape for rank in held):
        raise FileError(path, [FieldError(name, "the ranks of tensor parallelism hold parts of other shapes")])
    parts = [rank[name] for rank in held]
    one = parts[0]
    if len(parts) == 1:
        return one
    if _COLUMNS.search(name):
        return concatenated(parts, axis=1)
    if _GATED.search(name) and _is_gated(name, held[0]):
        # Each rank holds its part of the gate above its part of the other half.
        half = one.shape[0] // 2
        shape = (half, *one.shape[1:])
        gates = [changed(part, shape, lambda bits: bits[:half]) for part in parts]
        others = [changed(part, shape, lambda bits: bits[half:]) for part in parts]
        return concatenated([*gates, *others])
    if _ROWS.search(name) or _GATED.search(name):
        return concatenated(parts)
    return one


def _is_gated(name: str, rank: Mapping[str, LazyTensor]) -> bool:
    layer = name.rpartition(".linear_fc1.")[0]
    fc1, fc2 = rank.get(f"{layer}.linear_fc1.weight"), rank.get(f"{layer}.linear_fc2.weight")
    return fc1 is not None and fc2 is not None and fc1.shape[0] == 2 * fc2.shape[-1]
