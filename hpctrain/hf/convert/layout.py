"""What the layouts of all tools share: tensors that are made of others, and the search for tensors in a checkpoint that
holds other things, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hpctrain.base.errors import FieldError, FileError
from hpctrain.hf.convert.torch_file import Bits, LazyTensor

LLAMA_KEYS = ("num_attention_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings")
"""Keys of a Llama's config.json that no shape of a tensor tells."""
_TRAINING_STATE = (
    "optimizer", "optim", "lr_scheduler", "opt_param_scheduler", "scheduler", "dataloader", "train_state", "rng_state",
    "rerun_state_machine",
)  # fmt: skip
"""First words of names that training loops give to values other than the model's weights."""


class ModelLayout(Protocol):
    """The tensors of one tool's model in a checkpoint, and how they become those of a Hugging Face folder."""

    tool: str
    """The tool, in words."""
    needed: tuple[str, ...]
    """Keys of config.json without which the folder cannot be made."""
    may_shrink: tuple[str, ...]
    """Keys of config.json whose values may be smaller than the tensors; the further rows are cut off."""

    def config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of config.json that the checkpoint tells.

        Args:
            given: keys of config.json that the user gave.

        Raises:
            FileError: a tensor is missing, or its shape contradicts another tensor or a key.
        """
        ...

    def tensors(self, config: Mapping[str, Any]) -> dict[str, LazyTensor]:
        """Return the tensors of the Hugging Face folder by name, in the model's order.

        Args:
            config: all keys of config.json.

        Raises:
            FileError: tensors are missing, or there are others than those of the model.
        """
        ...


@dataclass(frozen=True)
class ModelTensors:
    """The model's tensors of a checkpoint, by name. A prefix that all of them have is removed."""

    source: Path
    by_name: dict[str, LazyTensor]
    used: set[str] = field(default_factory=set)
    """Names of the tensors that were taken."""

    def error(self, name: str, text: str) -> FileError:
        """Return the error that the tensor `name` of the checkpoint is wrong."""
        return FileError(self.source, [FieldError(name, text)])

    def __getitem__(self, name: str) -> LazyTensor:
        """Return a tensor.

        Raises:
            FileError: the checkpoint has no such tensor.
        """
        self.used.add(name)
        tensor = self.by_name.get(name)
        if tensor is None:
            raise self.error(name, "no such tensor; name a checkpoint with all weights of the model")
        return tensor

    def matrix(self, name: str) -> LazyTensor:
        """Return a tensor with two axes.

        Raises:
            FileError: there is no such tensor, or it has other axes.
        """
        tensor = self[name]
        if len(tensor.shape) != 2:
            raise self.error(name, f"found shape {list(tensor.shape)}; a matrix is expected")
        return tensor

    def layers(self, pattern: str) -> int:
        """Return the number of layers, from 0 on without a gap, that have the tensor of a name such as
        'layers.{}.wo.weight'."""
        number = 0
        while pattern.format(number) in self.by_name:
            number += 1
        return number

    def check_all_used(self, tool: str, *also: str) -> None:
        """Check that every tensor of the model was taken.

        Args:
            tool: the tool, in words, for the error.
            also: names of tensors that need not be taken.

        Raises:
            FileError: some were not taken; up to 8 of them are named.
        """
        others = [name for name in self.by_name if name not in {*self.used, *also}]
        if others:
            text = f"no part of {tool} here; hpctrain converts no model with it"
            raise FileError(self.source, [FieldError(name, text) for name in others[:8]])


def model_tensors(source: Path, tensors: Mapping[str, LazyTensor], known: str) -> ModelTensors | None:
    """Return the model's tensors of a checkpoint; None if it has no tensor `known`.

    Args:
        known: name of a tensor that every such model has; a checkpoint may hold it after a prefix, such as
            'model.'. Only tensors with this prefix are returned, by their names without it.
    """
    weights = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] not in _TRAINING_STATE}
    names = [name for name in weights if name == known or name.endswith(f".{known}")]
    if not names:
        return None
    prefix = min(names, key=len).removesuffix(known)
    model = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    return ModelTensors(source, model)


def changed(tensor: LazyTensor, shape: Sequence[int], change: Callable[[Bits], Bits]) -> LazyTensor:
    """Return the tensor of shape `shape` that `change` makes of `tensor`."""
    return LazyTensor(tensor.dtype, tuple(shape), lambda first, end: change(tensor.read())[first:end])


def transposed(tensor: LazyTensor) -> LazyTensor:
    """Return a matrix with its axes exchanged, or a vector as it is."""
    return changed(tensor, tensor.shape[::-1], np.transpose)


def concatenated(parts: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """Return a tensor made of others, which lie one after the other along an axis."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)

    def rows(first: int, end: int) -> Bits:
        return np.concatenate([part.read() for part in parts], axis=axis)[first:end]

    return LazyTensor(parts[0].dtype, tuple(shape), rows)


def first_rows(tensor: LazyTensor, count: int) -> LazyTensor:
    """Return the first rows of a tensor."""
    return LazyTensor(tensor.dtype, (count, *tensor.shape[1:]), tensor.rows)


def are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Return whether two tensors hold the same bits. Both are read whole."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and np.array_equal(one.read(), other.read())


def size(config: Mapping[str, Any], key: str, source: Path) -> int:
    """Return the size at `key` of a config.json, which has the key.

    Args:
        source: path for errors.

    Raises:
        FileError: the value is no whole number from 1 to 2^31 − 1.
    """
    value = config[key]
    if type(value) is not int or not 1 <= value < 2**31:
        raise FileError(source, [FieldError(key, f"found {value!r:.60}; a whole number from 1 to 2^31-1 is expected")])
    return value


def parts_of(whole: int, count: int, model: ModelTensors, name: str, key: str) -> int:
    """Return `whole` / `count`.

    Args:
        name: tensor whose size `whole` is, for the error.
        key: key of config.json whose value `count` is, for the error.

    Raises:
        FileError: the result is no whole number, or `count` is below 1.
    """
    if count < 1 or whole % count:
        raise model.error(name, f"its size {whole} is no multiple of {key} {count}")
    return whole // count
