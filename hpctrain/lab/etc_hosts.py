"""The lab's lines in /etc/hosts: functions add and remove them in the text, and write the whole file."""

from __future__ import annotations

import errno
from pathlib import Path

from hpctrain.base.atomic import rewrite_text, storage_errors
from hpctrain.base.errors import InputError, StorageError
from hpctrain.lab.layout import LabLayout

MARK = "# hpctrain-lab"


def without_lab(text: str) -> str:
    """Return the file's text without the lines of any lab."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.rstrip().endswith(MARK))


def with_lab(text: str, layout: LabLayout) -> str:
    """Return the file's text with a line for each node; lines of an earlier lab are dropped.

    Raises:
        InputError: another host has the name of a node.
    """
    others = without_lab(text)
    taken = {name for line in others.splitlines() for name in line.partition("#")[0].split()[1:]}
    clash = [name for name in layout.names if name in taken]
    if clash:
        raise InputError(f"nodes: found '{clash[0]}', which /etc/hosts gives to another host; choose another name")
    if others and not others.endswith("\n"):
        others += "\n"
    return others + "".join(f"{layout.address(name)} {name} {MARK}\n" for name in layout.names)


def write_hosts(path: Path, text: str) -> None:
    """Replace the file atomically with its owner and mode unchanged, because every user of the machine reads it. In a
    container, where the file is a mount and cannot be replaced, write into it.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        rewrite_text(path, text)
    except StorageError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EBUSY:
            raise
        with storage_errors(path):
            path.write_text(text, encoding="utf-8")
