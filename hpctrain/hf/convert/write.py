"""Writes tensors as safetensors files, one tensor at a time (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.errors import InputError
from hpctrain.base.units import format_bytes
from hpctrain.hf.convert.torch_file import Bits, LazyTensor

_ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write a safetensors file with the tensors, by name. The memory holds one tensor at a time.

    Raises:
        StorageError: the file cannot be written.
        FileError: a tensor cannot be read.
        InputError: the memory is too small for a tensor.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.size_bytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with storage_errors(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            file.write(_bits_of(name, tensor).data)
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
