"""Where each tensor lies in the safetensors files of an export or a conversion, and which process writes it. Pure.

The safetensors library writes a file only as a whole, from memory. With the places known beforehand, a file is written
tensor by tensor, by several processes.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.hf.tensors import HfTensor

DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""torch's name of a type of numbers -> its name in a safetensors file."""
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Type of numbers -> bytes of a number, in the order in which a file has the types."""


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor and its place in an export."""

    tensor: HfTensor
    file: str
    """Name of the file."""
    offset: int
    """Byte of the file at which the tensor begins."""
    size_bytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A safetensors file before its tensors are written."""

    header: bytes
    """First bytes of the file; the tensors follow it without gaps."""
    tensors: list[PlacedTensor]
    size_bytes: int
    """Size of the whole file."""


def lay_out(name: str, tensors: Sequence[HfTensor], dtypes: Mapping[str, str]) -> SafetensorsFile:
    """Return the layout of a file: that which the safetensors library gives to a file of these tensors.

    Args:
        name: the file's name.
        tensors: the tensors in the file, in any order.
        dtypes: name of a tensor -> type of its numbers, as a safetensors file names it.
    """
    sizes = {tensor.name: tensor.count * _BYTES[dtypes[tensor.name]] for tensor in tensors}
    order = list(_BYTES)
    ordered = sorted(tensors, key=lambda tensor: (order.index(dtypes[tensor.name]), tensor.name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + sizes[tensor.name]
        entries[tensor.name] = {"dtype": dtypes[tensor.name], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    header = len(text).to_bytes(8, "little") + text
    placed = [
        PlacedTensor(tensor, name, len(header) + entries[tensor.name]["data_offsets"][0], sizes[tensor.name])
        for tensor in ordered
    ]
    return SafetensorsFile(header, placed, len(header) + end)


def share_tensors(tensors: Iterable[PlacedTensor], processes: int) -> list[list[PlacedTensor]]:
    """Return the tensors that each of the processes writes: all tensors, each once, largest first and
    always to the process with the fewest bytes so far."""
    shares: list[list[PlacedTensor]] = [[] for _ in range(processes)]
    fewest = [(0, number) for number in range(processes)]
    for placed in sorted(tensors, key=lambda placed: -placed.size_bytes):
        size, number = fewest[0]
        shares[number].append(placed)
        heapq.heapreplace(fewest, (size + placed.size_bytes, number))
    return shares
