"""The pair matrix: figures of all node pairs of a large cluster as arrays, and their file beside topology.json.

The half million pairs of 1,000 nodes take 300 MB as JSON objects, but only 28 MB as arrays of single precision.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import zipfile
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hpctrain.base.atomic import write_bytes
from hpctrain.base.errors import FieldError, FileError
from hpctrain.records.format.input_file import read_input
from hpctrain.records.topology.figures import RATE_MAX, SECONDS_MAX

Array = npt.NDArray[np.float32]

FIGURES = (
    "latency_min_s", "latency_p50_s", "latency_p95_s", "bytes_per_s", "isolated_bytes_per_s", "alpha_s",
    "beta_s_per_byte",
)  # fmt: skip


class PairMatrix:
    """Figures of all pairs of nodes: for each name in FIGURES an array [source, target] of shape (nodes, nodes). A
    figure that was not measured is NaN.

    `bytes_per_s` was measured while the other pairs of the round sent, too, `isolated_bytes_per_s` while only this pair
    sent. `alpha_s` and `beta_s_per_byte` follow from the size sweep, which not every pair has.
    """

    def __init__(self, nodes: Sequence[str], figures: dict[str, Array] | None = None) -> None:
        self.nodes = list(nodes)
        shape = (len(self.nodes), len(self.nodes))
        self.figures = figures or {name: np.full(shape, np.nan, np.float32) for name in FIGURES}

    @cached_property
    def index(self) -> dict[str, int]:
        """Return node -> its index in the rows and columns of each array."""
        return {name: row for row, name in enumerate(self.nodes)}

    def __getitem__(self, figure: str) -> Array:
        return self.figures[figure]

    @property
    def rate(self) -> Array:
        """Return the bandwidth of each pair in bytes/s, as an array [source, target]: the loaded bandwidth, or the
        isolated bandwidth if only this one was measured, or NaN."""
        loaded = self.figures["bytes_per_s"]
        return np.where(np.isnan(loaded), self.figures["isolated_bytes_per_s"], loaded)

    @property
    def measured(self) -> npt.NDArray[np.bool_]:
        """Return a boolean array [source, target], which is True for pairs with a measured bandwidth."""
        return ~np.isnan(self.rate)

    def costs(self) -> tuple[Array, Array]:
        """Return (alpha in seconds, beta in seconds per byte) of time = alpha + beta × bytes, as arrays
        [source, target]. A pair without a size sweep has its latency as alpha and the inverse of its bandwidth as beta;
        figures that were not measured are NaN."""
        rate = self.rate
        per_byte = np.divide(1.0, rate, where=rate >= 1, out=np.full_like(rate, np.nan))
        alpha, beta = self.figures["alpha_s"], self.figures["beta_s_per_byte"]
        fitted = ~np.isnan(alpha) & ~np.isnan(beta)
        return np.where(fitted, alpha, self.figures["latency_p50_s"]), np.where(fitted, beta, per_byte)

    def only(self, nodes: Iterable[str]) -> PairMatrix:
        """Return a pair matrix with only the nodes that are in `nodes`, in the order of this matrix."""
        keep = set(nodes)
        rows = [row for row, name in enumerate(self.nodes) if name in keep]
        cut = {name: array[np.ix_(rows, rows)] for name, array in self.figures.items()}
        return PairMatrix([self.nodes[row] for row in rows], cut)

    def snapshot(self) -> PairMatrix:
        """Return a copy of the pair matrix with its own arrays, so that later measurements do not change the copy."""
        return PairMatrix(self.nodes, {name: array.copy() for name, array in self.figures.items()})

    @cached_property
    def _bytes(self) -> bytes:
        """Return the content of the pair matrix's file: an uncompressed npz, the same bytes for the same figures."""
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {name: self.figures[name] for name in FIGURES}
        np.savez(buffer, nodes=np.array(self.nodes, dtype=np.str_), **arrays)
        return buffer.getvalue()

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of the content of the pair matrix's file, in hexadecimal digits."""
        return hashlib.sha256(self._bytes).hexdigest()

    @property
    def file_name(self) -> str:
        """Return the name of the pair matrix's file, made from the hash of its content. So topology.json never refers
        to the pair matrix of another probe, even if its writer is killed after it has written only one of both
        files."""
        return f"pairs-{self.sha256[:12]}.npz"

    def write(self, folder: Path) -> None:
        """Write the pair matrix to its file in `folder`, atomically.

        Raises:
            StorageError: the file cannot be written.
        """
        write_bytes(folder / self.file_name, self._bytes)


_DAMAGED = (ValueError, KeyError, SyntaxError, EOFError, RuntimeError, zipfile.BadZipFile)
"""Errors that zipfile and numpy raise for a file that is not a zip archive of arrays."""
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype><f4|<U\d{1,4})', 'fortran_order': (?P<by_columns>True|False), "
    rb"'shape': \((?P<shape>\d{1,7},(?: \d{1,7})?)\), \} *\n",
    re.DOTALL,
)
"""Header of an array as numpy writes it (numpy.lib.format, version 1.0). This pattern replaces numpy's own reader,
which parses the header as Python source."""
_HEADER_BYTES = 4096
"""Upper limit of the bytes that zip and npy headers add to an array; numpy writes 128."""


def _bytes_at_most(nodes: Sequence[str]) -> int:
    """Return the largest possible size of a pair matrix's file for these nodes, in bytes. In the file's array of names,
    each name takes the length of the longest, with four bytes a character."""
    longest = max(map(len, nodes), default=0)
    return len(FIGURES) * (4 * len(nodes) ** 2 + _HEADER_BYTES) + 4 * longest * len(nodes) + _HEADER_BYTES


def _array(stored: zipfile.ZipFile, name: str, kind: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return the array `name` in a pair matrix's file, after checking that its header states the type `kind` and the
    shape `shape`. A hostile header could claim any size.

    Raises:
        ValueError: the array is compressed, or of another type or shape.
    """
    entry = stored.getinfo(f"{name}.npy")
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is packed, expected plain numbers")
    data = stored.read(entry)
    header = _NPY.match(data)
    if header is None:
        raise ValueError(f"{name} is no array of numpy's format 1.0")
    start, dtype = header.end(), np.dtype(header["dtype"].decode())
    stored_shape = tuple(int(size) for size in header["shape"].split(b",") if size.strip())
    if stored_shape != shape or dtype.kind != kind.kind or (kind.kind == "f" and dtype != kind):
        raise ValueError(f"{name} has shape {stored_shape} of {dtype}, expected {shape} of {kind}")
    if len(data) - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {len(data) - start} bytes, expected {math.prod(shape) * dtype.itemsize}")
    order: Literal["F", "C"] = "F" if header["by_columns"] == b"True" else "C"
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order=order)


def _figure_max(name: str) -> float:
    """Return the highest value that the figure `name` of a pair matrix may have."""
    if name.endswith("bytes_per_s"):
        return RATE_MAX
    return SECONDS_MAX if name.endswith("_s") else 1.0


def read_pairs(path: Path, sha256: str, nodes: Sequence[str], topology: Path) -> PairMatrix:
    """Return the pair matrix in the file at `path`, if the file has the hash `sha256`.

    Args:
        nodes: names of the topology's nodes, in file order.
        topology: path of the topology.json that refers to `path`, for errors.

    Raises:
        FileError: the file is missing, unreadable, has another hash, is of other nodes, or has a figure that is
            negative, infinite or above every real one.
    """
    try:
        data = read_input(path, _bytes_at_most(nodes))
    except FileError as error:
        why = f"{path} cannot be read ({error.mistakes[0].text}); copy it from beside the original, or probe again"
        raise FileError(topology, [FieldError("fabric.matrix.file", why)]) from None
    if hashlib.sha256(data).hexdigest() != sha256:
        why = f"{path} is damaged or of another probe; copy it from beside the original, or probe again"
        raise FileError(topology, [FieldError("fabric.matrix.sha256", why)])
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as stored:
            names = [str(name) for name in _array(stored, "nodes", np.dtype(np.str_), (len(nodes),))]
            square = (len(nodes), len(nodes))
            figures: dict[str, Array] = {name: _array(stored, name, np.dtype(np.float32), square) for name in FIGURES}
    except _DAMAGED as error:
        why = f"{path} is not a file of pairs: {str(error)[:200]}"
        raise FileError(topology, [FieldError("fabric.matrix.file", why)]) from None
    if names != list(nodes):
        raise FileError(topology, [FieldError("fabric.matrix.file", f"{path} is of other nodes than the topology")])
    for name, array in figures.items():
        most = _figure_max(name)
        allowed = np.isnan(array) | ((array >= 0) & (array <= most))
        if not allowed.all():
            row, column = np.argwhere(~allowed)[0]
            why = f"{path}: {name} from {names[row]} to {names[column]}: found {array[row, column]}"
            raise FileError(topology, [FieldError("fabric.matrix.file", f"{why}; allowed: 0 to {most:g}; probe again")])
    return PairMatrix(names, figures)
