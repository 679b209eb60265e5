"""Finds input files and their formats, and divides the files into work units.

Formats follow from file names and from the layout of folders that Hugging Face `datasets` saved. Work units are of
about equal size, and depend only on the input.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import FileError, InputError
from hpctrain.base.requirements import pip_install
from hpctrain.corpus.input.compressed_input import COMPRESSED_SUFFIXES, uncompressed_name
from hpctrain.records.format.document import read_json
from hpctrain.records.format.file_name import plain_name_in

Format = Literal["text", "jsonl", "parquet", "arrow"]
FormatChoice = Literal["auto", "text", "jsonl", "parquet", "arrow"]

TEXT_SUFFIXES = (".md", ".py", ".rst", ".tex", ".txt")
"""Suffixes of the text files that are taken from a folder, compressed or not; a file that you name yourself is taken
whatever its suffix."""

_RECORDS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
"""Suffix -> format, for files of records (JSON lines, tables) that are taken from a folder. A `.json` file is taken
only if it is compressed, as in the C4 corpus, because plain ones usually hold settings."""
_NAMED: dict[str, Format] = {**_RECORDS, ".json": "jsonl", ".arrow": "arrow"}

_SAVE_AGAIN = "save the dataset again"

_TRAIN = re.compile(r"(^|[-_./])train([-_./]|$)")
_OTHER = re.compile(r"(^|[-_./])(valid|validation|dev|test|eval)([-_./]|$)")

UNIT_BYTES = (16 * 1024 * 1024, 1024 * 1024 * 1024)
"""Smallest and largest size of a work unit in bytes. With small units, a killed command loses little work; with large
ones, there are fewer shards."""
UNITS = 1024
"""Approximate number of work units of a corpus of 16 GiB to 1 TiB; a smaller corpus has fewer units, a larger one more.
Each unit makes at least one shard, and a process can memory-map only some ten thousand files."""


@dataclass(frozen=True)
class InputFile:
    """An input file and its format."""

    path: Path
    format: Format


@dataclass(frozen=True)
class InputFiles:
    """The files to read, sorted by path, without duplicates, and the files that were left out, by reason."""

    files: tuple[InputFile, ...]
    other_splits: tuple[Path, ...] = ()
    """Files left out because their names say validation or test, while names of other files in the folder say train."""
    beside_records: tuple[Path, ...] = ()
    """Text files left out because their folder also holds files of records (JSON lines, tables)."""


@dataclass(frozen=True)
class FileRange:
    """An input file, or a part of it."""

    path: Path
    format: Format
    size_bytes: int
    """Size of the file or part on disk, in bytes."""
    start: int = 0
    """Where the part begins. In a file of lines: a byte, and the part's first line begins there or later. In a Parquet
    file: the number of a row group."""
    stop: int | None = None
    """Byte or row group at which the next part begins; None if the part ends with the file."""


WorkUnit = tuple[FileRange, ...]
"""The files and parts of files that one process prepares as one task."""


def find_inputs(named: Sequence[Path], choice: FormatChoice = "auto") -> InputFiles:
    """Return the files that the user named, and the files in the folders that the user named.

    A folder that Hugging Face `datasets` saved gives its Arrow files. A folder with .parquet or .jsonl files gives
    these, and of several splits only the training split. Any other folder gives its text files. Hidden files and
    folders are left out; symbolic links to folders are not followed.

    Args:
        named: files and folders.
        choice: format of the files; 'auto': by their names.

    Raises:
        InputError: a named file or folder does not exist or is a pipe, a saved dataset has no training split, or a
            format needs a library that is not installed.
    """
    parts: list[InputFiles] = []
    for path in named:
        if path.is_dir():
            parts.append(_of_folder(path, choice))
        elif path.is_file():
            parts.append(InputFiles((InputFile(path, format_of(path) if choice == "auto" else choice),)))
        elif path.exists():
            # Text is read twice, and a pipe can be read only once.
            raise InputError(f"IN: {path}: found a pipe or device, allowed: files and folders; save the text to a file")
        else:
            raise InputError(f"IN: {path}: no such file or folder")
    files = sorted({file for part in parts for file in part.files}, key=lambda file: file.path)
    _need_libraries(files)
    taken = {file.path for file in files}  # a left-out file that was also named by itself is taken
    others = {path for part in parts for path in part.other_splits} - taken
    beside = {path for part in parts for path in part.beside_records} - taken
    return InputFiles(tuple(files), tuple(sorted(others)), tuple(sorted(beside)))


def format_of(path: Path) -> Format:
    """Return the format of a file by its name; 'text' if the suffix names no other format."""
    return _NAMED.get(Path(uncompressed_name(path)).suffix, "text")


def expand(patterns: Sequence[str], base: Path) -> list[Path]:
    """Return the paths that match the patterns (with * ? or []); a relative pattern starts at the folder `base`.

    Raises:
        InputError: a pattern matches nothing. A path without * ? or [] may be missing.
    """
    paths: list[Path] = []
    for pattern in patterns:
        if not re.search(r"[*?\[]", pattern):
            paths.append(base / pattern)
            continue
        path = Path(pattern)
        root, relative = (Path(path.anchor), path.relative_to(path.anchor)) if path.is_absolute() else (base, path)
        matches = sorted(root.glob(str(relative)))
        if not matches:
            raise InputError(f"{pattern}: found no such file below {base}; patterns start at the recipe's folder")
        paths.extend(matches)
    return paths


def _of_folder(folder: Path, choice: FormatChoice) -> InputFiles:
    if choice in ("auto", "arrow"):
        saved = _saved_dataset(folder)
        if saved:
            return InputFiles(tuple(saved))
    paths = list(_walk(folder))
    texts = tuple(path for path in paths if uncompressed_name(path).endswith(TEXT_SUFFIXES))
    formats = {} if choice == "text" else {path: _record_format(path, choice) for path in paths}
    records = {path: format_ for path, format_ in formats.items() if format_ is not None}
    if records or choice not in ("auto", "text"):
        training = dict.fromkeys(_training_files(folder, list(records)))
        others = tuple(path for path in records if path not in training)
        files = tuple(InputFile(path, records[path]) for path in training)
        return InputFiles(files, others, texts if choice == "auto" else ())
    return InputFiles(tuple(InputFile(path, "text") for path in texts))


def _record_format(path: Path, choice: FormatChoice) -> Format | None:
    suffix = Path(uncompressed_name(path)).suffix
    packed_json = suffix == ".json" and path.suffix.lower() in COMPRESSED_SUFFIXES
    format_: Format | None = "jsonl" if packed_json else _RECORDS.get(suffix)
    if choice == "arrow":
        return "arrow" if suffix == ".arrow" else None
    return format_ if choice in ("auto", format_) else None


def _training_files(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Return those of the `files` in a folder that are for training: all, unless the name of some file says train. Then
    files whose names say validation or test, and not train, are left out."""
    names = {path: str(path.relative_to(folder)).lower() for path in files}
    if not any(_TRAIN.search(name) for name in names.values()):
        return list(files)
    return [path for path, name in names.items() if _TRAIN.search(name) or not _OTHER.search(name)]


def _saved_dataset(folder: Path) -> list[InputFile]:
    """Return the Arrow files of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` of Hugging Face
    `datasets` wrote; an empty list for any other folder. Of several splits, only the files of `train` are returned.

    Raises:
        InputError: none of several splits is called train, or a file is missing.
    """
    splits = json_object(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        names = [plain_name_in(folder / "dataset_dict.json", "splits", name, _SAVE_AGAIN) for name in splits]
        if "train" not in names and len(names) != 1:
            raise InputError(
                f"IN: {folder}: found the splits {', '.join(names[:8]) or 'none'} and none called train; "
                f"name the folder of one"
            )
        return _saved_dataset(folder / ("train" if "train" in names else names[0]))
    entries = json_object(folder / "state.json").get("_data_files")
    if not isinstance(entries, list):
        return []
    named = [entry["filename"] for entry in entries if isinstance(entry, dict) and "filename" in entry]
    names = [plain_name_in(folder / "state.json", "_data_files", name, _SAVE_AGAIN) for name in named]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"IN: {folder}: {missing[0]} is missing, which its state.json names; save the dataset again")
    return [InputFile(folder / name, "arrow") for name in names]


def json_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; empty if the file is missing or holds anything but a JSON object."""
    try:
        value = read_json(path)
    except FileError:
        return {}
    return value if isinstance(value, dict) else {}


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(here, name)


def _need_libraries(files: Sequence[InputFile]) -> None:
    for module, needed in (
        ("pyarrow", [file.path for file in files if file.format in ("parquet", "arrow")]),
        ("zstandard", [file.path for file in files if file.path.name.lower().endswith(".zst")]),
    ):
        if needed:
            require_library(module, f"IN: {needed[0]}")


def require_library(module: str, purpose: str) -> None:
    """Check, before any other work, that an optional library is installed.

    Args:
        purpose: what needs the library, for the error: an option or an input file.

    Raises:
        InputError: the library is missing; the message says how to install it.
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{purpose}: needs {module}, which is not installed; run `{pip_install(module)}`")


def unit_bytes(total_bytes: int) -> int:
    """Return the size of a work unit (bytes on disk) for an input of `total_bytes`."""
    low, high = UNIT_BYTES
    return min(max(total_bytes // UNITS, low), high)


def plan_work_units(
    files: Sequence[tuple[InputFile, int]], size_bytes: int, row_groups: Callable[[Path], list[int]]
) -> list[WorkUnit]:
    """Return work units of about `size_bytes`, in the order of the files.

    Small files are combined. Large ones are cut where their format allows it: at line ends, or between row groups. A
    compressed file stays whole, because it can be read only from its beginning.

    Args:
        files: each file with its size in bytes.
        row_groups: returns the bytes of each row group of a Parquet file.
    """
    units: list[WorkUnit] = []
    held: list[FileRange] = []
    for file, size in files:
        if size > size_bytes:
            if held:
                units.append(tuple(held))
                held = []
            units.extend((piece,) for piece in _cut(file, size, size_bytes, row_groups))
            continue
        held.append(FileRange(file.path, file.format, size))
        if sum(piece.size_bytes for piece in held) >= size_bytes:
            units.append(tuple(held))
            held = []
    return [*units, tuple(held)] if held else units


def _cut(file: InputFile, size: int, size_bytes: int, row_groups: Callable[[Path], list[int]]) -> Iterator[FileRange]:
    if file.format in ("text", "jsonl") and uncompressed_name(file.path) == file.path.name.lower():
        starts = [size * n // math.ceil(size / size_bytes) for n in range(math.ceil(size / size_bytes))]
        sizes = [to - start for start, to in zip(starts, [*starts[1:], size], strict=True)]
    else:
        sizes_of_groups = row_groups(file.path) if file.format == "parquet" else []
        starts, sizes = [0], [0]
        for number, group in enumerate(sizes_of_groups):
            if sizes[-1] >= size_bytes:
                starts.append(number)
                sizes.append(0)
            sizes[-1] += group
        # Row groups have uncompressed sizes; progress counts bytes on disk, so they are scaled to the file's size.
        whole = max(1, sum(sizes))
        sizes = [size * part // whole for part in sizes] if sizes_of_groups else [size]
    stops = [*starts[1:], None]
    for start, stop, part in zip(starts, stops, sizes, strict=True):
        yield FileRange(file.path, file.format, part, start, stop)
