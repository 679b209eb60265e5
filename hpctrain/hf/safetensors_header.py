"""The header of a safetensors file: which tensors it holds, and where. It is checked before any tensor is read.

Format: 8 bytes with the length of a JSON header, the header with type, shape and offsets of each tensor, then the
tensors, one after the other without holes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard

from hpctrain.base.errors import FieldError, FileError
from hpctrain.base.json_text import JsonError, parse_json
from hpctrain.records.format.input_file import open_input

_HEADER_LIMIT = 100_000_000
"""Largest header that the format allows, bytes."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of a number, by type."""
_SIZE_MAX = 2**62


@dataclass(frozen=True)
class StoredTensor:
    """Name, type, shape and position of one tensor in a safetensors file."""

    file: Path
    name: str
    """Name in the file."""
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    size_bytes: int


def tensors_in(path: Path) -> list[StoredTensor]:
    """Return the tensors of one file.

    Raises:
        FileError: the file cannot be read, is no safetensors file, or is truncated.
    """
    try:
        with os.fdopen(open_input(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(_HEADER_LIMIT, size - 8):
                raise _error(path, f"not a safetensors file: its header claims {length} bytes, the file has {size}")
            header = file.read(length)
        entries = parse_json(header)
    except OSError as error:
        raise FileError(path, [FieldError("", f"cannot read: {error.strerror}")]) from None
    except JsonError as error:
        raise _error(path, f"not a safetensors file: its header is no JSON ({error})") from None
    if not isinstance(entries, dict):
        raise _error(path, "not a safetensors file: its header has no keys")
    entries.pop("__metadata__", None)
    tensors = [_stored(path, name, entry, 8 + length) for name, entry in entries.items()]
    tensors.sort(key=attrgetter("begin", "size_bytes"))
    end = 8 + length
    for item in tensors:
        if item.begin != end:
            raise _error(path, f"data_offsets begin at byte {item.begin}, expected at {end}", item.name)
        end += item.size_bytes
    if size != end:
        raise _error(path, f"has {size} bytes, its header says {end}")
    return tensors


def _stored(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    """Return the tensor that one entry of the header describes.

    Raises:
        FileError: the entry has values that the format does not allow.
    """
    values: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = values.get("shape"), values.get("data_offsets"), values.get("dtype")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _error(path, f"found dtype {dtype!r:.60}; allowed: {', '.join(_BITS)}", name)
    if not _are_sizes(shape) or math.prod(shape) > _SIZE_MAX:
        raise _error(path, f"found shape {shape!r:.60}; a list of sizes is expected", name)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(path, f"found data_offsets {offsets!r:.60}; a begin and an end are expected", name)
    expected = -(-math.prod(shape) * _BITS[dtype] // 8)
    if offsets[1] - offsets[0] != expected:
        raise _error(path, f"data_offsets hold {offsets[1] - offsets[0]} bytes, dtype and shape need {expected}", name)
    return StoredTensor(path, name, dtype, tuple(shape), start + offsets[0], expected)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= 32 and all(type(item) is int and item >= 0 for item in value)


def _error(path: Path, text: str, name: str = "") -> FileError:
    return FileError(path, [FieldError(name, f"{text}; copy the folder again")])
