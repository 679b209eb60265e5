"""Finds text that every machine with Python has, such as manual pages: a corpus for a first run, without a download."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.units import format_si
from hpctrain.corpus.input.compressed_input import open_plain

SAMPLE_TEXT_BYTES = 32 * 1000 * 1000
"""Bytes of text for a first run: enough that some thousand steps of the smallest model read each text only a few
times."""

FILE_BYTES = (200, 1_000_000)
"""Smallest and largest file that is taken, in bytes: smaller ones are mostly empty Python modules, larger ones mostly
tables."""


@dataclass(frozen=True)
class TextLocation:
    """A folder that may hold text, and what that text is (`title`: 'manual pages')."""

    title: str
    folder: Path
    pattern: re.Pattern[str]
    """Pattern that the paths of the files to take match, relative to the folder."""


@dataclass(frozen=True)
class SampleText:
    """Files with text from this machine, sorted by path, as input for `prepare`."""

    files: tuple[Path, ...]
    text_bytes: int
    """Uncompressed size of all files together, in bytes."""
    description: str
    """One line for people: how much text it is, and how many files of which kind."""


def document_locations() -> tuple[TextLocation, ...]:
    """Return the folders with documents on a Linux machine: mostly English prose. A minimal system may lack some of
    them."""
    return (
        # Sections 1 to 8 of the untranslated pages; the folders of other languages are siblings of these.
        TextLocation("manual pages", Path("/usr/share/man"), re.compile(r"^man[1-8]/[^/]+\.\d[a-z]*(\.gz)?$")),
        TextLocation("licences", Path("/usr/share/common-licenses"), re.compile(r"^[^/]+$")),
        TextLocation(
            "package documents",
            Path("/usr/share/doc"),
            re.compile(r"^.*(/(README|NEWS|TODO|FAQ)[^/]*|\.(txt|md|rst)(\.gz)?)$"),
        ),
    )


def standard_library() -> TextLocation:
    """Return the folder with the source code of Python's standard library. It has the same files in every environment
    of one Python."""
    code = re.compile(r"(^|.*/)[^/]+\.(py|md|rst|txt)$")
    return TextLocation("files of Python's standard library", Path(sysconfig.get_paths()["stdlib"]), code)


def default_text_locations() -> tuple[TextLocation, ...]:
    """Return the folders that hold text on a Linux machine with Python; a minimal system may lack some of them."""
    installed = re.compile(r"^(?!.*(?:\.dist-info|\.egg-info)/).*\.(py|md|rst|txt)$")
    packages = TextLocation("files of installed Python packages", Path(sysconfig.get_paths()["purelib"]), installed)
    return (*document_locations(), standard_library(), packages)


def find_sample_text(limit_bytes: int = SAMPLE_TEXT_BYTES, places: Sequence[TextLocation] | None = None) -> SampleText:
    """Return files with about `limit_bytes` of text. Each location gives up to an equal share. What is then missing is
    taken from the locations in order.

    The same machine gives the same files. A missing location gives nothing; the result may be empty.

    Args:
        places: the locations; None: `default_text_locations()`.
    """
    places = default_text_locations() if places is None else places
    streams = [_text_in(place) for place in places]
    taken: list[list[tuple[Path, int]]] = [[] for _ in places]
    room = limit_bytes
    for share in (limit_bytes // max(1, len(places)), limit_bytes):
        for stream, files in zip(streams, taken, strict=True):
            room -= _take(stream, files, min(share, room))
    total = limit_bytes - room
    counts = [f"{len(files)} {place.title}" for place, files in zip(places, taken, strict=True) if files]
    description = f"{format_si(total, 'B')} of text found on this machine: {', '.join(counts) or 'none'}"
    return SampleText(tuple(sorted({path for files in taken for path, _ in files})), total, description)


def _take(stream: Iterator[tuple[Path, int]], files: list[tuple[Path, int]], share: int) -> int:
    """Move (file, bytes) pairs from the stream to `files` until their bytes reach `share`. Return the sum of their
    bytes."""
    total = 0
    while total < share:
        item = next(stream, None)
        if item is None:
            break
        files.append(item)
        total += item[1]
    return total


def _text_in(place: TextLocation) -> Iterator[tuple[Path, int]]:
    """Yield (file, uncompressed bytes) for each text file of a location, folder by folder, each folder's files by name.
    Files whose uncompressed size is outside of the range FILE_BYTES are left out.
    """
    for here, folders, names in os.walk(place.folder):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__pycache__")) and f != "site-packages")
        for name in sorted(names):
            path = Path(here, name)
            if path.is_symlink() or not place.pattern.match(str(path.relative_to(place.folder))):
                continue
            size = _text_size(path)
            if FILE_BYTES[0] <= size <= FILE_BYTES[1]:
                yield path, size


def _text_size(path: Path) -> int:
    """Return the uncompressed bytes of a file, plain or .gz; 0 if it cannot be read."""
    try:
        if path.suffix != ".gz":
            return path.stat().st_size if path.is_file() and os.access(path, os.R_OK) else 0
        with open_plain(path) as file:
            # The last four bytes of a gzip member are its uncompressed size (RFC 1952, section 2.3.1).
            file.seek(-4, os.SEEK_END)
            return int.from_bytes(file.read(4), "little")
    except OSError:
        return 0
