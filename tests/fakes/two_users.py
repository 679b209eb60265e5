"""Another user of the same machine: what it makes, and what it is told. Needs root; the ids need not be known here."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

ME, OTHER, PROJECT = 12345, 12346, 23456
"""Two users and a group that has no name and no member in any list."""

Value = TypeVar("Value")


def as_user(uid: int, action: Callable[[], Value], groups: tuple[int, ...] = ()) -> Value:
    """What `action` returns or raises in a process of that user, whose own group has the same number.

    Modules that it needs must be imported already: the user may not be able to read where Python lies.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(list(groups))
            os.setgid(uid)
            os.setuid(uid)
            answer: tuple[bool, object] = (True, action())
        except BaseException as error:
            answer = (False, error)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    worked, value = pickle.loads(data)
    if not worked:
        raise value
    return value


@contextmanager
def shared_space(mode: int = 0o1777, group: int = 0) -> Iterator[Path]:
    """A folder of root's that several users work in, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="hpctrain-shared-"))
    os.chown(path, 0, group)
    path.chmod(mode)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def give(path: Path, uid: int, gid: int | None = None) -> None:
    """Make a folder and all in it another user's, links themselves included."""
    for item in (path, *path.rglob("*")):
        os.chown(item, uid, uid if gid is None else gid, follow_symlinks=False)
