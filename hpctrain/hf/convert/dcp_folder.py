"""Reads the tensors of a folder of torch's distributed checkpoints (DCP), without torch. The file `.metadata` is a
pickle, which is read as data (`pickle_data`); each part of a tensor is an archive of `torch.save` within a file
`*.distcp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.base.errors import FieldError, FileError
from hpctrain.hf.convert.pickle_data import PickleDataError, PickledName, PickledObject, pickle_data
from hpctrain.hf.convert.torch_file import BITS, TORCH_TYPES, Bits, LazyTensor, TorchFile, sizes
from hpctrain.records.format.file_name import plain_name_in
from hpctrain.records.format.input_file import read_input

METADATA = ".metadata"
_METADATA_BYTES = 256 * 2**20
_REMEDY = "copy the checkpoint again"
_CELLS_MAX = 2**24
"""Most cells into which the edges of all parts cut a tensor; those of 1,000 parts of any sizes make 4 million."""


@dataclass(frozen=True)
class _StoredPart:
    """A part of a tensor: its first index and its size on each axis of the tensor, and the archive that holds it, which
    is `length` bytes of `file` from byte `begin` on."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    length: int


def tensors_of_dcp(folder: Path) -> dict[str, LazyTensor]:
    """Return name -> tensor for all tensors of floating-point numbers of a DCP folder. Other values are left out.

    Raises:
        FileError: `.metadata` is missing or damaged, parts of a tensor are missing, or a tensor is compressed.
    """
    path = folder / METADATA
    try:
        value = pickle_data(read_input(path, _METADATA_BYTES))
        described, places = _tables(value)
    except PickleDataError as error:
        raise FileError(path, [FieldError("", f"{error}; {_REMEDY}")]) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise FileError(path, [FieldError("", f"is not what torch writes as {METADATA}; {_REMEDY}")]) from None
    tensors = {}
    for name, entry in described.items():
        if not isinstance(entry, PickledObject) or not entry.name.endswith(".TensorStorageMetadata"):
            continue
        try:
            tensor = _tensor(folder, name, entry, places)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            raise FileError(path, [FieldError(name, f"is not what torch writes there; {_REMEDY}")]) from None
        if tensor is not None:
            tensors[name] = tensor
    return tensors


def _tables(value: Any) -> tuple[dict[str, Any], dict[tuple[str, tuple[int, ...]], Any]]:
    """Return name -> description of a tensor, and (name, offsets of a part) -> where the part is stored, from `value`,
    the content of the file .metadata.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: `value` is not what torch writes.
    """
    described, stored = value.state["state_dict_metadata"], value.state["storage_data"]
    if not (
        isinstance(described, dict) and isinstance(stored, dict) and all(isinstance(key, str) for key in described)
    ):
        raise ValueError("no tables")
    places = {}
    for index, place in stored.items():
        if isinstance(index.state["fqn"], str) and index.state.get("offset") is not None:
            places[index.state["fqn"], sizes(index.state["offset"])] = place
    return described, places


def _tensor(folder: Path, name: str, entry: PickledObject, places: dict[Any, Any]) -> LazyTensor | None:
    """Return the tensor `name` of the folder; None if its numbers are no floating-point numbers.

    Args:
        entry: description of the tensor in `.metadata`.
        places: (name of a tensor, offsets of a part) -> where the part is stored.

    Raises:
        FileError: parts of the tensor are missing, overlap or are compressed.
        ValueError, TypeError, KeyError, AttributeError, IndexError: the entry is not what torch writes.
    """
    properties = entry.state["properties"].state
    kind = properties["dtype"] if isinstance(properties, dict) else properties[0]
    dtype = TORCH_TYPES.get(kind.name) if isinstance(kind, PickledName) else None
    shape = sizes(entry.state["size"])
    if dtype is None or not shape or 0 in shape:
        return None
    parts = []
    for chunk in entry.state["chunks"]:
        offsets = sizes(chunk.state["offsets"], len(shape))
        extent = sizes(chunk.state["sizes"], len(shape))
        if 0 in extent:
            continue  # a rank without a part of the tensor
        if (name, offsets) not in places:
            raise _error(folder, name, f"its part at {list(offsets)} is stored in no file; {_REMEDY}")
        place = places[name, offsets].state
        if place.get("transform_descriptors"):
            raise FileError(
                folder / METADATA, [FieldError(name, "is compressed; save the checkpoint without extensions")]
            )
        file = plain_name_in(folder / METADATA, name, place["relative_path"], _REMEDY)
        if not (type(place["offset"]) is int and type(place["length"]) is int):
            raise ValueError("no place")
        if place["length"] < math.prod(extent) * np.dtype(BITS[dtype]).itemsize:
            raise ValueError("a part that is larger than its bytes")
        if any(start + size > whole for start, size, whole in zip(offsets, extent, shape, strict=True)):
            raise ValueError("a part outside of the tensor")
        parts.append(_StoredPart(offsets, extent, file, place["offset"], place["length"]))
    if not _is_whole(parts, shape):
        raise _error(folder, name, f"its parts are not the whole of shape {list(shape)}; {_REMEDY}")

    def rows(first: int, end: int) -> Bits:
        inside = [part for part in parts if part.offsets[0] < end and part.offsets[0] + part.shape[0] > first]
        stored = [_stored(folder, name, part, dtype) for part in inside]  # checked before memory is taken
        whole = np.empty((end - first, *shape[1:]), BITS[dtype])
        for part, tensor in zip(inside, stored, strict=True):
            begin = part.offsets[0]
            low, high = max(first, begin), min(end, begin + part.shape[0])
            other_axes = zip(part.offsets[1:], part.shape[1:], strict=True)
            place = (slice(low - first, high - first), *(slice(start, start + size) for start, size in other_axes))
            whole[place] = tensor.rows(low - begin, high - begin)
        return whole

    return LazyTensor(dtype, shape, rows)


def _is_whole(parts: list[_StoredPart], shape: tuple[int, ...]) -> bool:
    """Return whether the parts hold each number of a tensor exactly once. The time is linear in the number of parts, if
    they are the cells of a grid."""
    if not parts:
        return False
    edges = [
        sorted({part.offsets[axis] for part in parts} | {part.offsets[axis] + part.shape[axis] for part in parts})
        for axis in range(len(shape))
    ]
    counts = [len(edge) - 1 for edge in edges]
    if any((edge[0], edge[-1]) != (0, size) for edge, size in zip(edges, shape, strict=True)):
        return False
    if math.prod(counts) > _CELLS_MAX:
        return False
    numbers = [{index: number for number, index in enumerate(edge)} for edge in edges]
    held = np.zeros(counts, bool)
    for part in parts:
        bounds = zip(numbers, part.offsets, part.shape, strict=True)
        cells = tuple(slice(number[start], number[start + size]) for number, start, size in bounds)
        if held[cells].any():
            return False
        held[cells] = True
    return bool(held.all())


def _stored(folder: Path, name: str, part: _StoredPart, dtype: str) -> LazyTensor:
    """Return the tensor that is stored for a part of the tensor `name`, after the check that it has the type `dtype`
    and the shape of the part."""
    archive = TorchFile(folder / part.file, part.begin, part.length)
    tensor = archive.tensor(archive.value(), name)
    if tensor.dtype != dtype or tensor.shape != part.shape:
        # Megatron describes a layer as a row of the stack of all layers, and stores it without that axis.
        if tensor.dtype != dtype or (1, *tensor.shape) != part.shape:
            text = f"found {tensor.dtype} {list(tensor.shape)}; {METADATA} says {dtype} {list(part.shape)}"
            raise archive.error(text, name)
        return LazyTensor(dtype, part.shape, lambda first, end: tensor.read()[np.newaxis])
    return tensor


def _error(folder: Path, name: str, text: str) -> FileError:
    return FileError(folder / METADATA, [FieldError(name, text)])
