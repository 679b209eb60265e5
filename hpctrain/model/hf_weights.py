"""Converts weights: from a Hugging Face folder to a stage's parameters, and from parameters to the folder's tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import InputError
from hpctrain.hf.config import architecture_of
from hpctrain.hf.folder import StoredTensor, find_stored, stored_tensors, weights_sha256
from hpctrain.hf.tensors import HfTensor
from hpctrain.records.model.hf_model import HfModel


class HfWeights:
    """The weights of a Hugging Face folder; each stage reads only those that it holds."""

    def __init__(self, model: HfModel, folder: Path) -> None:
        """Read the headers of the folder's files, and check that they are those from which the run was made.

        Raises:
            InputError: the folder has no safetensors files, or other weights than when the run was made.
            FileError: a file is damaged.
        """
        self._tensors: dict[str, tuple[HfTensor, int]] = {}
        row = architecture_of(model)
        for tensor in row.tensors(model.dims):
            for number, name in enumerate(tensor.parameters):
                self._tensors.setdefault(name, (tensor, number))
        self._stored = stored_tensors(folder, row)
        if weights_sha256(self._stored) != model.weights_sha256:
            raise InputError(
                f"model.hf: {folder}: its weights are not those that were there when the run was made; put them back, "
                "or start a new run"
            )

    def fill(self, module: nn.Module) -> None:
        """Set every parameter of a stage, whose parameters are not split over devices yet, to the folder's weights.

        Raises:
            KeyError: the folder's model has no parameter of a name in the stage.
            OSError: a file cannot be opened any more.
        """
        self.copy_to(module.named_parameters())

    @torch.no_grad()
    def copy_to(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the folder's weights into whole parameters, given as (name, tensor). Each weight is converted to the
        dtype of its parameter.

        The method reads only the bytes of these parameters, one after the other. If a tensor of the folder holds
        several parameters in groups (`HfTensor.groups`), all its bytes are read for each of these parameters.

        Raises:
            KeyError: the folder's model has no parameter of this name.
            OSError: a file cannot be opened any more.
        """
        with contextlib.ExitStack() as stack, ACTIVITY.doing("read the weights of model.hf"):
            files: dict[Path, Any] = {}
            for name, parameter in named:
                tensor, number = self._tensors[name]
                stored = find_stored(tensor, self._stored)
                assert stored is not None, "a folder was checked when the run was made, and is the same"
                if stored.file not in files:
                    files[stored.file] = stack.enter_context(safe_open(stored.file, framework="pt"))
                parameter.copy_(_part(files[stored.file], stored, tensor, number))


def _part(file: Any, stored: StoredTensor, tensor: HfTensor, number: int) -> Tensor:
    """Return one parameter of hpctrain's model, read from a stored tensor, which may hold several parameters.

    Args:
        file: the open safetensors file.
        stored: the tensor in the file.
        tensor: how the tensor holds parameters of hpctrain's model.
        number: index of the parameter in the tensor.
    """
    where = slice(*tensor.spans[number])
    piece = file.get_slice(stored.name)
    if tensor.groups > 1:
        within = slice(where.start // tensor.groups, where.stop // tensor.groups)
        return piece[:].unflatten(0, (tensor.groups, -1))[:, within].flatten(0, 1)
    part: Tensor = piece[:, where] if tensor.axis == 1 else piece[where]
    return part.t() if tensor.transposed else part


def to_hf_tensor(tensor: HfTensor, own: Sequence[Tensor]) -> Tensor:
    """Return the tensor of a Hugging Face folder that `tensor` describes.

    Args:
        own: parameters of hpctrain's model, in the order of `tensor.parameters`.
    """
    if tensor.groups > 1:
        return torch.cat([part.unflatten(0, (tensor.groups, -1)) for part in own], dim=1).flatten(0, 1)
    parts = [part.t() if tensor.transposed else part for part in own]
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(parts, dim=tensor.axis)
