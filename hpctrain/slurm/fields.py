"""The text of `scontrol -o`: one record a line, `Key=value` fields whose values may hold blanks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpctrain.base.errors import CommandError
from hpctrain.records.format.node_set import expand_node_set

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9/:_]*)=")
# A job's name is free text that stands before the fields that matter: "x JobState=FAILED" must not be read as a state.
_JOB_NAME = re.compile(r"\sJobName=.*?\s(?=UserId=\S*\(\S*\)\s)")
_WHOLE = re.compile(r"\d{1,18}", re.ASCII)
_EMPTY = ("", "(null)", "None assigned", "None", "N/A", "n/a", "NONE")


def records(text: str, key: str) -> Iterator[dict[str, str]]:
    """The fields of every line that starts with `key=`; other lines ("No jobs in the system") hold no record."""
    for line in text.splitlines():
        if line.startswith(f"{key}="):
            yield fields(line)


def fields(line: str) -> dict[str, str]:
    """Field -> value; of a field that comes twice the first counts, as free text (comments, reasons) comes last."""
    line = _JOB_NAME.sub(" ", line, count=1)
    found: dict[str, str] = {}
    keys = list(_KEY.finditer(line))
    for index, key in enumerate(keys):
        end = keys[index + 1].start() if index + 1 < len(keys) else len(line)
        found.setdefault(key[1], line[key.end() : end].strip())
    return found


def required(record: dict[str, str], key: str) -> str:
    """The value of a field that every version of Slurm prints.

    Raises:
        CommandError: it is not there: this text is not what Slurm prints.
    """
    if key not in record:
        shown = " ".join(f"{name}={value}" for name, value in record.items())[:100]
        raise CommandError(f"scontrol: no field '{key}' in its answer '{shown}'; read so far: 22.05, 24.11")
    return record[key]


def text_or_none(value: str) -> str | None:
    """The value, or None for the ways in which Slurm says that there is none."""
    return None if value in _EMPTY else value


def number(value: str) -> int | None:
    """A whole number; None for UNLIMITED, N/A and the like. The upper end of a range: '1-4' -> 4."""
    return parse_unsigned(value.rpartition("-")[2])


def parse_unsigned(text: str) -> int | None:
    """The number that a text of up to 18 digits is (64 bits, as in Slurm); None for any other text."""
    return int(text) if _WHOLE.fullmatch(text) else None


def node_names(text: str) -> tuple[str, ...]:
    """Names of a Slurm node list: 'gpu[01-03],mig1' -> four names; () for '(null)'.

    Raises:
        CommandError: the list is cut off or not a node list.
    """
    if text_or_none(text) is None:
        return ()
    try:
        return tuple(expand_node_set(text))
    except ValueError as error:
        raise CommandError(f"Slurm: cannot read the node list '{text[:100]}': {error}") from error
