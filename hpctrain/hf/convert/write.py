"""Writes tensors as safetensors files, one tensor at a time (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.errors import InputError
from hpctrain.base.units import format_bytes
from hpctrain.hf.convert.torch_file import Bits, LazyTensor
from hpctrain.hf.safetensors_layout import SafetensorsFile


def write_safetensors(path: Path, layout: SafetensorsFile, tensors: Mapping[str, LazyTensor]) -> None:
    """Write a safetensors file. The memory holds one tensor at a time, and what the tensor is made of.

    Args:
        layout: the tensors in the file, and their places.
        tensors: name -> tensor, for at least the tensors of `layout`.

    Raises:
        StorageError: the file cannot be written.
        FileError: a tensor cannot be read.
        InputError: the memory is too small for a tensor.
    """
    with storage_errors(path), path.open("wb") as file:
        file.write(layout.header)
        for placed in layout.tensors:
            file.write(_bits_of(placed.tensor.name, tensors[placed.tensor.name]).data)
    with storage_errors(path):
        sync(path)


def _bits_of(name: str, tensor: LazyTensor) -> Bits:
    try:
        bits = np.ascontiguousarray(tensor.read())
    except MemoryError:
        text = f"{name}: no memory for its {format_bytes(tensor.size_bytes)}; convert on a machine with more"
        raise InputError(text) from None
    assert bits.size == math.prod(tensor.shape), "a layout gives each tensor the shape that it names"
    return bits
