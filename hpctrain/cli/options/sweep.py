"""The options `--sweep`, `--sweep-file` and `--array-limit`: which runs a sweep has."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.cli.options.parameters import FILE
from hpctrain.cli.options.starting import parse_range
from hpctrain.launch.sweep_settings import Settings, check_runs_differ, check_swept_keys
from hpctrain.records.format.input_file import read_input_text
from hpctrain.records.format.yaml_file import YAML_BYTES
from hpctrain.records.history.sweep import RUNS_MAX

_FORM = "write it as KEY=VALUE,VALUE,… or, for whole numbers, KEY=0-4 or KEY=0-20/5"
_OPENING, _CLOSING = "[{", "]}"


def sweep_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a sweep to a click command."""
    for option in (
        click.option(
            "--array-limit", type=click.IntRange(min=1), metavar="N", help="Of a sweep, at most N runs train at once."
        ),
        click.option("--sweep-file", type=FILE, metavar="CSV", help="One run a row; the header has the keys."),
        click.option(
            "--sweep", "sweeps", multiple=True, metavar="KEY=VALUES",
            help="One run for each value: optimizer.lr=1e-3,3e-4 or seed=0-4. Several: each with each.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def expand_sweep(sweeps: Sequence[str], file: Path | None, overrides: Sequence[str] = ()) -> list[Settings]:
    """Return the settings of each run of a sweep: each row of the file with each combination of the values of `sweeps`;
    the values of the last one change fastest. [] without `sweeps` and `file`.

    Args:
        sweeps: values of the options `--sweep`.
        file: a CSV file whose header has keys, with one run a row; an empty cell leaves the key as it is.
        overrides: values of the options `--set`, which may not set a swept key.

    Raises:
        InputError: a value is wrong, a key is given twice or may not be swept, two runs are equal, or there are too
            many.
        FileError: the CSV file cannot be read, or a row in it is wrong.
    """
    if not sweeps and file is None:
        return []
    axes: list[list[Settings]] = [_read_rows(file)] if file is not None else []
    count = math.prod(len(axis) for axis in axes)
    for text in sweeps:
        key, items = _parse_sweep(text)
        count *= sum(len(item) for item in items)
        if count > RUNS_MAX:
            raise InputError(f"--sweep: found {count} runs or more; allowed: up to {RUNS_MAX}; submit several sweeps")
        axes.append([{key: str(value)} for item in items for value in item])
    check_swept_keys([list(dict.fromkeys(key for row in axis for key in row)) for axis in axes], overrides)
    runs = [dict(pair for part in parts for pair in part.items()) for parts in itertools.product(*axes)]
    check_runs_differ(runs)
    return runs


def _parse_sweep(text: str) -> tuple[str, list[Sequence[object]]]:
    """Return the key of a `--sweep`, and its values: a Python `range` for each range of whole numbers, and a list of
    one text for each other value.

    No range is written out, as it may be long.

    Raises:
        InputError: the text is not of the form KEY=VALUES, or a range ends before it begins.
    """
    key, equals, values = text.partition("=")
    key = key.strip()
    items = [item.strip() for item in _split(values)] if equals else []
    if not key or not all(items) or not items:
        raise InputError(f"--sweep: found {text!r}; {_FORM}")
    ranges: list[Sequence[object]] = []
    for item in items:
        numbers = parse_range(item) if "-" in item else None
        if numbers is not None and not numbers:
            raise InputError(f"--sweep: found {item!r} in {text!r}, a range that ends before it begins; {_FORM}")
        ranges.append(numbers or [item])
    return key, ranges


def _split(text: str) -> list[str]:
    """Return the parts of a text between commas, not counting commas in brackets and in quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not parts[-1][:-1].strip(" [{,:"):
            quote = character
        elif character in _OPENING or (character in _CLOSING and depth):
            depth += 1 if character in _OPENING else -1
    return parts


def _read_rows(file: Path) -> list[Settings]:
    text = read_input_text(file, YAML_BYTES).removeprefix("\ufeff")  # which spreadsheets write
    reader = csv.reader(io.StringIO(text), strict=True, skipinitialspace=True)
    rows: list[Settings] = []
    try:
        header = [cell.strip() for cell in next(reader, [])]
        if not all(header) or not header or len(set(header)) < len(header):
            raise _mistake(file, 1, f"found the keys {', '.join(header)!r}; expected a key of the run file a column")
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) > len(header):
                raise _mistake(file, reader.line_num, f"found {len(cells)} cells; the header has {len(header)} keys")
            rows.append({key: cell.strip() for key, cell in zip(header, cells, strict=False) if cell.strip()})
            if len(rows) > RUNS_MAX:
                raise _mistake(file, reader.line_num, f"found more than {RUNS_MAX} runs; submit several sweeps")
    except csv.Error as error:
        raise _mistake(file, reader.line_num, f"no CSV: {error}") from None
    if not rows:
        raise _mistake(file, 1, "found no run; expected a header of keys, and one run a row below it")
    return rows


def _mistake(file: Path, line: int, text: str) -> FileError:
    return FileError(file, [FieldError("", text, line)])
