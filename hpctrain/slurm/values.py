"""Parsers of Slurm's output: the `Key=value` fields of a line of `scontrol -o`, whose values may contain blanks, the
columns of squeue and sacct, node lists, time limits ("1-12:30:15") and moments (seconds since 1970, or local ISO
8601)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from hpctrain.base.errors import CommandError
from hpctrain.records.format.node_name import expand_node_set

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9/:_]*)=")
# A job's name is free text before the other fields: "x JobState=FAILED" must not be read as a state.
_JOB_NAME = re.compile(r"\sJobName=.*?\s(?=UserId=\S*\(\S*\)\s)")
_WHOLE = re.compile(r"\d{1,18}", re.ASCII)
SEPARATOR = "\x1f"
"""Separator of columns: ASCII's unit separator, which no node list, reason or partition name contains."""
_EMPTY = ("", "(null)", "None assigned", "None", "N/A", "n/a", "NONE")


def records(text: str, key: str) -> Iterator[dict[str, str]]:
    """Yield {field: value} for each line of `scontrol -o` that starts with `key=`; other lines, such as "No jobs in the
    system", are skipped."""
    for line in text.splitlines():
        if line.startswith(f"{key}="):
            yield fields(line)


def fields(line: str) -> dict[str, str]:
    """Return {field: value} of a line of `scontrol -o`. If a field occurs twice, its first value counts, because free
    text (comments, reasons) comes last."""
    line = _JOB_NAME.sub(" ", line, count=1)
    values: dict[str, str] = {}
    keys = list(_KEY.finditer(line))
    for index, key in enumerate(keys):
        end = keys[index + 1].start() if index + 1 < len(keys) else len(line)
        values.setdefault(key[1], line[key.end() : end].strip())
    return values


def split_columns(text: str, columns: Sequence[str], command: str) -> Iterator[dict[str, str]]:
    """Yield {column: value} for each line of an answer whose columns SEPARATOR separates.

    Args:
        columns: names of the columns, in order.
        command: name of the command, for the error.

    Raises:
        CommandError: a line does not have these columns.
    """
    for line in filter(str.strip, text.splitlines()):
        values = [value.strip() for value in line.split(SEPARATOR)]
        if len(values) < len(columns):
            raise CommandError(f"{command}: {len(values)} fields in its answer '{line[:100]}', not {len(columns)}")
        yield dict(zip(columns, values, strict=False))


def required(record: dict[str, str], key: str) -> str:
    """Return the value of a field that every version of Slurm prints.

    Raises:
        CommandError: the field is missing, so the text is not Slurm's.
    """
    if key not in record:
        shown = " ".join(f"{name}={value}" for name, value in record.items())[:100]
        raise CommandError(f"scontrol: no field '{key}' in its answer '{shown}'; read so far: 22.05, 24.11")
    return record[key]


def text_or_none(value: str) -> str | None:
    """Return the value; None for the texts with which Slurm says that there is no value, such as '(null)'."""
    return None if value in _EMPTY else value


def number(value: str) -> int | None:
    """Return the whole number that a value of Slurm is; for a range, its upper end: '1-4' -> 4; None for UNLIMITED, N/A
    and any other text."""
    return parse_unsigned(value.rpartition("-")[2])


def parse_unsigned(text: str) -> int | None:
    """Return the number of a text of 1 to 18 digits, which fits into Slurm's 64 bits; None for any other text."""
    return int(text) if _WHOLE.fullmatch(text) else None


def node_names(text: str) -> tuple[str, ...]:
    """Return the names in a Slurm node list: 'gpu[01-03],mig1' -> four names; () for '(null)'.

    Raises:
        CommandError: the list is truncated or not a node list.
    """
    if text_or_none(text) is None:
        return ()
    try:
        return tuple(expand_node_set(text))
    except ValueError as error:
        raise CommandError(f"Slurm: cannot read the node list '{text[:100]}': {error}") from error


_MEMORY = re.compile(r"(\d{1,12})([KMGT]?)B?", re.IGNORECASE | re.ASCII)
_KIB = {"K": 1, "": 2**10, "M": 2**10, "G": 2**20, "T": 2**30}


def parse_memory(text: str) -> int | None:
    """Return the MiB of a size as sbatch's --mem takes it, rounded up: '16G' -> 16384, '500' -> 500; None for any other
    text."""
    match = _MEMORY.fullmatch(text)
    return None if match is None else -(-int(match[1]) * _KIB[match[2].upper()] // 2**10)


_NO_LIMIT = ("unlimited", "infinite", "-1")
_FORMS = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes:seconds, UNLIMITED"
_PLAIN = re.compile(r"(?:(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)|(?P<minutes>\d+))", re.ASCII)
_DAYS = re.compile(r"(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?", re.ASCII)
_YEAR_10000_S = 253402300800.0
"""The first moment that `datetime` cannot write as a date."""
_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1, "minutes": 60}


def parse_time_limit(text: str) -> int | None:
    """Return the seconds of a time limit in any form that sbatch accepts; None without a limit (UNLIMITED, 0).

    "30" is minutes, "1:30:00" hours, minutes and seconds, "2-0" days and hours.

    Raises:
        ValueError: the text has none of these forms.
    """
    text = text.strip()
    if text.lower() in _NO_LIMIT:
        return None
    form = _DAYS.fullmatch(text) or _PLAIN.fullmatch(text)
    if not form:
        raise ValueError(f"found '{text}'; allowed: {_FORMS}")
    parts = form.groupdict()
    # sbatch reads a limit of zero as no limit.
    return sum(int(value) * _UNITS_S[name] for name, value in parts.items() if value) or None


def format_time_limit(seconds: int | None) -> str:
    """Return a time limit as Slurm prints it: 5400 -> '01:30:00', 131415 -> '1-12:30:15', None -> 'UNLIMITED'."""
    if seconds is None:
        return "UNLIMITED"
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def read_duration(text: str) -> int | None:
    """Return the seconds of a time limit in Slurm's output; None for no limit and for a text that is no time."""
    try:
        return parse_time_limit(text)
    except ValueError:
        return None  # NONE, NOT_SET, INVALID, Partition_Limit, n/a, (null)


def read_moment(text: str) -> float | None:
    """Return the seconds since 1970-01-01 UTC of a moment in Slurm's output; None for Unknown, N/A and None.

    hpctrain asks Slurm for seconds (SLURM_TIME_FORMAT=%s); the default form is local time without a zone.
    """
    try:
        seconds = float(text) if text.isascii() and text.isdigit() else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds < _YEAR_10000_S else None
