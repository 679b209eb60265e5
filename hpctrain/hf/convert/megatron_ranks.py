"""Reads Megatron's older checkpoints: a file `mp_rank_TT[_PPP]/model_optim_rng.pt` for each rank of tensor and pipeline
parallelism. The pickles in them are read as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.hf.convert.layout import are_equal, changed, concatenated
from hpctrain.hf.convert.megatron import ARGUMENTS
from hpctrain.hf.convert.pickle_data import PickledObject
from hpctrain.hf.convert.torch_file import LazyTensor, TorchFile, has_no_floats

OTHER_KIND = "a value of another kind"
"""Stands for an argument that is no plain value."""

_FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3}))?")
_FILE = "model_optim_rng.pt"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_SPLIT = re.compile(
    r"(^embedding\.word_embeddings|^output_layer|\.linear_qkv|\.linear_fc1)\.(weight|bias)$"
    r"|\.(linear_proj|linear_fc2)\.weight$"
)
"""Tensors of which each rank of tensor parallelism holds a part; each rank holds the whole of any other tensor."""
_COLUMNS = re.compile(r"\.(linear_proj|linear_fc2)\.weight$")
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")
_PARALLEL_SIZES = ("pipeline_model_parallel_size", "tensor_model_parallel_size")
_RANKS_MAX = 10_000
"""More than the ranks of each kind of parallelism that the names of folders have digits for."""
_REMEDY = "copy the files of all ranks of one checkpoint"


def is_megatron_ranks(folder: Path) -> bool:
    """Return whether the folder is an older Megatron checkpoint, with folders `mp_rank_…`."""
    return any(_FOLDER.fullmatch(path.name) for path in folder.glob("mp_rank_*"))


def tensors_of_ranks(folder: Path) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Return the model's tensors by name, each joined of the parts of all ranks, and Megatron-LM's arguments.

    Raises:
        InputError: a file of a rank is missing, the folder has ranks of expert parallelism, or two of its folders are
            of the same rank.
        FileError: a file is damaged, of Megatron before Megatron-Core, of a training with virtual pipeline stages, or
            of another checkpoint than the others.
    """
    ranks = {place: _rank(path) for place, path in _files_of_ranks(folder).items()}
    stages, parts = _check_ranks(folder, ranks)
    tensors: dict[str, LazyTensor] = {}
    first_layer = 0
    for stage in range(stages):
        held = [ranks[stage, part].tensors for part in range(parts)]
        layers = {int(match[1]) for name in held[0] if (match := _LAYER.match(name))}
        for name in held[0]:
            match = _LAYER.match(name)
            whole = f"decoder.layers.{first_layer + int(match[1])}.{match[2]}" if match else name
            tensors.setdefault(whole, _whole(ranks[stage, 0].path, name, held))
        first_layer += len(layers)
    return tensors, ranks[0, 0].arguments


def arguments_in(value: Any) -> dict[str, Any]:
    """Return Megatron-LM's arguments in what a checkpoint saved; an empty dict if there are none. An argument that is
    no plain value, such as a list, gets the text OTHER_KIND as its value."""
    args = value.get("args") if isinstance(value, dict) else None
    state = args.state if isinstance(args, PickledObject) else None
    if not isinstance(state, dict):
        return {}
    return {name: item if _is_plain(item) else OTHER_KIND for name, item in state.items() if isinstance(name, str)}


def _is_plain(item: Any) -> bool:
    if isinstance(item, int):
        return abs(item) < 2**63
    return item is None or isinstance(item, float | str)


@dataclass(frozen=True)
class _Rank:
    """What the file of a rank holds."""

    path: Path
    tensors: dict[str, LazyTensor]
    """The rank's part of each tensor, by name; layers are numbered within the rank's pipeline stage."""
    arguments: dict[str, Any]
    iteration: Any
    """Step of the training after which the file was written; None: the file does not say."""


def _files_of_ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """Return (pipeline stage, rank of tensor parallelism) -> file.

    Raises:
        InputError: the folder has ranks of expert parallelism, or two folders are of the same rank.
    """
    files: dict[tuple[int, int], Path] = {}
    for name in sorted(path.name for path in folder.glob("mp_rank_*")):
        match = _FOLDER.fullmatch(name)
        if match is None:
            text = "is no rank of tensor or pipeline parallelism; models with experts are not converted"
            raise InputError(f"{folder}: {name} {text}")
        place = (int(match[2] or 0), int(match[1]))
        if place in files:
            both = f"{files[place].parent.name} and {name}"
            raise InputError(f"{folder}: has {both} of the same rank; remove the one of another checkpoint")
        files[place] = folder / name / _FILE
    return files


def _check_ranks(folder: Path, ranks: Mapping[tuple[int, int], _Rank]) -> tuple[int, int]:
    """Return the numbers of pipeline stages and of ranks of tensor parallelism, after a check that the ranks are those
    of one checkpoint, all of them, and that the ranks of a stage hold parts of the same tensors.

    Args:
        ranks: (stage, rank of tensor parallelism) -> what the rank's file holds.

    Raises:
        InputError: a rank is missing.
        FileError: a rank differs from the others; the error names the rank's file.
    """
    first = next(iter(ranks.values()))
    present = [1 + max(place[axis] for place in ranks) for axis in (0, 1)]
    named = [first.arguments.get(name) for name in _PARALLEL_SIZES]
    sizes = [max(there, size) if type(size) is int else there for there, size in zip(present, named, strict=True)]
    stages, parts = (min(size, _RANKS_MAX) for size in sizes)
    for stage in range(stages):
        for part in range(parts):
            if (stage, part) not in ranks:
                name = f"mp_rank_{part:02d}" + (f"_{stage:03d}" if stages > 1 else "")
                raise InputError(f"{folder}: has no {name}; copy the files of all ranks into it")
    for (stage, _), rank in ranks.items():
        for name in (*_PARALLEL_SIZES, *ARGUMENTS):
            _check_same(rank, f"args.{name}", rank.arguments.get(name), first, first.arguments.get(name))
        _check_same(rank, "iteration", rank.iteration, first, first.iteration)
        of_stage = ranks[stage, 0]
        for name in dict.fromkeys((*of_stage.tensors, *rank.tensors)):
            tensor, other = (held.tensors.get(name) for held in (rank, of_stage))
            _check_same(rank, name, _kind(tensor), of_stage, _kind(other))
            if tensor is not None and other is not None and not _SPLIT.search(name) and not are_equal(tensor, other):
                raise _error(rank, name, f"has other numbers than in {of_stage.path.parent.name}")
    wrong = [
        FieldError(f"args.{name}", f"found {size}, and the folder has {there} ranks of it; {_REMEDY}")
        for name, size, there in zip(_PARALLEL_SIZES, named, present, strict=True)
        if type(size) is int and size != there
    ]
    if wrong:
        raise FileError(first.path, wrong)
    return stages, parts


def _check_same(rank: _Rank, name: str, value: Any, other: _Rank, expected: Any) -> None:
    if value != expected:
        text = f"found {value!s:.60}; {other.path.parent.name} has {expected!s:.60}"
        raise _error(rank, name, text)


def _error(rank: _Rank, name: str, text: str) -> FileError:
    return FileError(rank.path, [FieldError(name, f"{text}; {_REMEDY}")])


def _kind(tensor: LazyTensor | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _rank(path: Path) -> _Rank:
    file = TorchFile(path)
    value = file.value()
    model = value.get("model") if isinstance(value, dict) else None
    if not isinstance(model, dict) or "language_model" in model:
        keys = sorted(key for key in value if isinstance(key, str))[:8] if isinstance(value, dict) else "no dict"
        text = f"found {keys}; a model of Megatron-Core under 'model' is expected: convert it with Megatron-LM first"
        if "model0" in keys:
            text = "found the interleaved stages model0, model1, …; save the checkpoint without virtual pipeline stages"
        raise FileError(path, [FieldError("model", text)])
    tensors = {
        name: file.tensor(item, name)
        for name, item in model.items()
        if isinstance(name, str)
        and isinstance(item, PickledObject)
        and item.name.startswith("torch._utils._rebuild")
        and not has_no_floats(item)
    }
    iteration = value.get("iteration")
    return _Rank(path, tensors, arguments_in(value), iteration if _is_plain(iteration) else OTHER_KIND)


def _whole(path: Path, name: str, held: list[dict[str, LazyTensor]]) -> LazyTensor:
    """Return a tensor of a pipeline stage: joined of its parts on the ranks of tensor parallelism, or that of the
    first rank if every rank holds it whole.

    Args:
        path: file of the first rank, for errors.
        name: name of the tensor in the files of the stage.
        held: the tensors by name, for each rank.

    Raises:
        FileError: a tensor that is split by columns is no matrix.
    """
    parts = [rank[name] for rank in held]
    one = parts[0]
    if len(parts) == 1 or not _SPLIT.search(name):
        return one
    if _COLUMNS.search(name):
        if len(one.shape) != 2:
            raise FileError(path, [FieldError(name, f"found shape {list(one.shape)}; a matrix is expected")])
        return concatenated(parts, axis=1)
    if _GATED.search(name) and _is_gated(name, held[0]):
        # Each rank holds its part of the gate above its part of the other half.
        half = one.shape[0] // 2
        shape = (half, *one.shape[1:])
        gates = [changed(part, shape, lambda bits: bits[:half]) for part in parts]
        others = [changed(part, shape, lambda bits: bits[half:]) for part in parts]
        return concatenated([*gates, *others])
    return concatenated(parts)


def _is_gated(name: str, rank: Mapping[str, LazyTensor]) -> bool:
    layer = name.rpartition(".linear_fc1.")[0]
    fc1, fc2 = rank.get(f"{layer}.linear_fc1.weight"), rank.get(f"{layer}.linear_fc2.weight")
    return fc1 is not None and fc2 is not None and fc1.shape[0] == 2 * fc2.shape[-1]
