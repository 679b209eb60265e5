"""Reads what `torch.save` wrote, without torch: a zip archive, uncompressed, of one pickle and of the numbers of each
tensor. The pickle is read as data (`pickle_data`).

The archive may be a part of a larger file, as each tensor of a DCP folder is.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import FieldError, FileError
from hpctrain.hf.convert.pickle_data import PickleDataError, PickledName, PickledObject, pickle_data
from hpctrain.records.format.input_file import open_input

Bits = NDArray[Any]
"""The numbers of a tensor, each as an unsigned integer of the same bits. Conversions only move numbers."""

_PICKLE_BYTES = 256 * 2**20
"""Longest pickle that is read; one of a checkpoint's metadata has about 150 bytes for each part of a tensor."""
_HEADER_BYTES = 30
"""Bytes of the header of an entry of a zip archive, without its name."""
BITS = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32, "F64": np.uint64}
"""Type of numbers, as safetensors names it -> integers of their size."""
TORCH_TYPES = {"torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float64": "F64"}
"""torch's name of a type of numbers -> safetensors' name."""
_STORAGES = {
    "torch.HalfStorage": "F16", "torch.BFloat16Storage": "BF16", "torch.FloatStorage": "F32",
    "torch.DoubleStorage": "F64",
}  # fmt: skip


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read from its checkpoint only when it is needed."""

    dtype: str
    """Type of the numbers as safetensors names it: F16, BF16, F32 or F64."""
    shape: tuple[int, ...]
    rows: Callable[[int, int], Bits]
    """Function (first, end) that returns the part of the tensor from index `first` of its first axis up to `end`,
    excluded. Raises a FileError if the checkpoint's file is gone or damaged."""

    @property
    def number_bytes(self) -> int:
        """Bytes of one number."""
        return np.dtype(BITS[self.dtype]).itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of all numbers of the tensor."""
        return math.prod(self.shape) * self.number_bytes

    def read(self) -> Bits:
        """Return the whole tensor.

        Raises:
            FileError: the checkpoint's file is gone or damaged.
        """
        return self.rows(0, self.shape[0])


class TorchFile:
    """An archive of `torch.save`, or the part of a file that is one."""

    def __init__(self, path: Path, offset: int = 0, length: int | None = None) -> None:
        """Read the table of the archive's entries.

        Args:
            offset: first byte of the archive in the file.
            length: bytes of the archive; None: up to the end of the file.

        Raises:
            FileError: the file is missing, or has no archive of `torch.save` at `offset`.
        """
        self._path, self._offset = path, offset
        with self._opened() as file:
            size = os.fstat(file.fileno()).st_size
            length = size - offset if length is None else length
            if not 0 <= offset <= offset + length <= size:
                raise self.error(f"has {size} bytes, and a tensor is said to be at {offset} to {offset + length}")
            try:
                with zipfile.ZipFile(_Part(file, offset, length)) as archive:
                    entries = archive.infolist()
            except (zipfile.BadZipFile, struct.error, ValueError, OSError, NotImplementedError):
                raise self.error(
                    "is no archive of torch.save; checkpoints of torch before 1.6 have another form"
                ) from None
        self._length = length
        self._entries = {}
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise self.error("is compressed, and torch.save compresses nothing")
            if not 0 <= entry.header_offset <= length - _HEADER_BYTES - entry.file_size:
                raise self.error(f"its entry {entry.filename!r:.60} lies outside of it")
            self._entries[entry.filename.partition("/")[2]] = entry
        if "data.pkl" not in self._entries:
            raise self.error("is no archive of torch.save: it has no data.pkl")
        if "byteorder" in self._entries and self._bytes("byteorder", 16) != b"little":
            raise self.error("was written on a big-endian machine")

    def value(self) -> Any:
        """Return the value that was saved, as `pickle_data` describes it.

        Raises:
            FileError: the pickle is damaged, or too long.
        """
        try:
            return pickle_data(self._bytes("data.pkl", _PICKLE_BYTES))
        except PickleDataError as error:
            raise self.error(f"its pickle {error}") from None

    def tensor(self, value: Any, name: str) -> LazyTensor:
        """Return the tensor that a part of `value()` describes.

        Args:
            value: the part.
            name: name of the tensor, for errors.

        Raises:
            FileError: `value` is no dense tensor of floating-point numbers within its entry of the archive.
        """
        while isinstance(value, PickledObject) and value.name == "torch._utils._rebuild_parameter" and value.arguments:
            value = value.arguments[0]
        try:
            dtype, key, start, shape, strides = _described(value)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise self.error("no dense tensor of floating-point numbers", name) from None
        entry = self._entries.get(f"data/{key}")
        width = np.dtype(BITS[dtype]).itemsize
        count = 0 if entry is None else entry.file_size // width
        last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if entry is None or start < 0 or not shape or 0 in shape:
            raise self.error("no dense tensor of floating-point numbers", name)
        if last >= count or math.prod(shape) > count:
            raise self.error(f"is said to have shape {list(shape)}, and the file has {count} numbers for it", name)

        def rows(first: int, end: int) -> Bits:
            origin = start + first * strides[0]
            part = (end - first, *shape[1:])
            numbers = 1 + sum((size - 1) * stride for size, stride in zip(part, strides, strict=True))
            data = self._numbers(f"data/{key}", dtype, origin, numbers)
            return np.lib.stride_tricks.as_strided(data, part, [stride * width for stride in strides], writeable=False)

        return LazyTensor(dtype, shape, rows)

    def error(self, text: str, name: str = "") -> FileError:
        """Return the error that the file is wrong, in the tensor `name`; '': in no single tensor."""
        return FileError(self._path, [FieldError(name, f"{text}; copy the checkpoint again")])

    def _bytes(self, name: str, limit: int) -> bytes:
        start, size = self._place(name)
        if size > limit:
            raise self.error(f"its {name} has {size} bytes, expected at most {limit}")
        with self._opened() as file:
            file.seek(start)
            return file.read(size)

    def _numbers(self, name: str, dtype: str, first: int, count: int) -> Bits:
        kind = np.dtype(BITS[dtype])
        start, size = self._place(name)
        assert (first + count) * kind.itemsize <= size, "checked when the tensor was described"
        with self._opened() as file:
            numbers = np.fromfile(file, kind, count, offset=start + first * kind.itemsize)
        if len(numbers) < count:
            raise self.error("became shorter while it was read")
        return numbers

    def _place(self, name: str) -> tuple[int, int]:
        """Return first byte in the file and size of an entry of the archive."""
        entry = self._entries[name]
        with self._opened() as file:
            file.seek(self._offset + entry.header_offset)
            header = file.read(_HEADER_BYTES)
        # The name and an extra field of these lengths lie between the entry's own header and its bytes.
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = entry.header_offset + _HEADER_BYTES + lengths
        if header[:4] != b"PK\3\4" or start + entry.file_size > self._length:
            raise self.error(f"its entry {name!r:.60} lies outside of it")
        return self._offset + start, entry.file_size

    def _opened(self) -> Any:
        return os.fdopen(open_input(self._path), "rb")


class _Part(io.RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a position before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size < 0 else min(size, left)
        self._file.seek(self._offset + self._at)
        data: bytes = self._file.read(size)
        self._at += len(data)
        return data


def _described(value: Any) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Return of a pickled tensor: the type, the name of the archive's entry below data/ that has the numbers, the
    index of the tensor's first number in this entry, the shape, and the strides.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is no dense tensor.
    """
    if value.name not in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
        raise ValueError
    storage, start, shape, strides = value.arguments[:4]
    ((kind, named, key, *_),) = storage.arguments
    if kind != "storage" or storage.name != "persistent" or not isinstance(named, PickledName):
        raise ValueError
    if not (isinstance(key, str) and type(start) is int):
        raise ValueError
    return _STORAGES[named.name], key, start, sizes(shape), sizes(strides, len(sizes(shape)))


def has_no_floats(value: Any) -> bool:
    """Return whether a pickled tensor has no axis, no number, or numbers other than floating-point ones: such a tensor
    is no weight of a model."""
    try:
        ((_, named, *_),) = value.arguments[0].arguments
        shape = sizes(value.arguments[2])
        return named.name not in _STORAGES or not shape or 0 in shape
    except (ValueError, TypeError, IndexError, AttributeError):
        return False


def sizes(value: Any, length: int | None = None) -> tuple[int, ...]:
    """Return a pickled tuple, list or `torch.Size` as a tuple of sizes.

    Args:
        length: expected number of sizes; None: any number up to 8.

    Raises:
        ValueError: `value` is something else.
    """
    if isinstance(value, PickledObject) and value.name == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if (
        not isinstance(value, tuple | list)
        or len(value) > 8
        or not all(type(item) is int and 0 <= item < 2**48 for item in value)
    ):
        raise ValueError("no sizes")
    if length is not None and len(value) != length:
        raise ValueError("other axes")
    return tuple(value)
