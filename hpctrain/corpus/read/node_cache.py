"""Copies corpora to a node's local disk (`data.stage: node`); all runs of this user on the node share the copies.

A copy is named by the hash of its index, so it never holds other data. It appears by a rename, after the hash of every
shard was compared with the index. A process that uses a copy holds a lock on it; unused copies are removed when their
space is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError, StorageError, UntrustedError
from hpctrain.base.owned_files import OwnedFolder
from hpctrain.base.system.disk_space import check_disk_space, free_bytes
from hpctrain.corpus.read.tokens import read_index
from hpctrain.records.corpus import INDEX_NAME, CorpusIndex, Shard
from hpctrain.records.format.input_file import open_input, read_input

VARIABLE = "HPCTRAIN_STAGED"
"""Environment variable of the workers: JSON that maps corpus folders of the run file to their copies on this node."""
CHUNK_BYTES = 1 << 22
POLL_S = 0.1
STALLED_POLLS = 50
"""Number of looks, one every POLL_S, at a copy that lost files and that other processes still lock; then an error is
raised."""


@dataclass(frozen=True)
class CachedCorpus:
    """A copy of a corpus folder on this node's disk, locked against removal while its descriptor is open."""

    path: Path
    copied_bytes: int
    """Bytes that were copied for this process; 0 if the copy existed already."""
    descriptor: int
    """File descriptor that holds the lock; the kernel releases the lock at the end of the process, even if the process
    is killed."""


def cache_on_node(source: Path, base: Path, clock: Clock, give_up: Callable[[], str | None]) -> CachedCorpus:
    """Return this node's copy of the corpus folder `source`; make the copy if there is none.

    Args:
        base: a folder on the node's own disk; other users may be able to write to it, as to /tmp.
        give_up: called again and again while waiting and copying. When it returns a reason, an error with that reason
            is raised.

    Raises:
        HpctrainError: `source` is no corpus folder, the disk is too small, a shard differs from the index, another user
            owns the cache folder, another run removed files of the copy, or `give_up` returned a reason. No partial
            copy is left.
    """
    index = read_index(source)
    user_folder = _own_folder(base)
    name = f"corpus-{hashlib.sha256(read_input(source / INDEX_NAME)).hexdigest()[:32]}"
    with storage_errors(user_folder / name):
        descriptor = _opened_lock(user_folder, name)
        try:
            if _ready(descriptor, user_folder / name, index, clock, give_up):
                return CachedCorpus(user_folder / name, 0, descriptor)
            _make_room(user_folder, name, size_bytes(index))
            _copy(source, user_folder / name, index, give_up)
            # Other processes may use it now too. Changing a lock is not atomic, so another process may have locked it
            # in between.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not is_whole(user_folder / name, index):
                raise StorageError(f"{user_folder / name}: was removed by another run, which needed the room")
        except BaseException:
            os.close(descriptor)
            raise
    return CachedCorpus(user_folder / name, size_bytes(index), descriptor)


def size_bytes(index: CorpusIndex) -> int:
    """Return the bytes of all shards of a corpus together."""
    return sum(_shard_bytes(shard, index) for shard in index.shards)


def is_whole(path: Path, index: CorpusIndex) -> bool:
    """Return whether the copy of a corpus in the folder `path` has the file index.json, and every shard of `index`,
    each as large as `index` says. A program of the site that deletes old files may have removed some.

    Args:
        index: the index of the corpus, as read from the corpus folder.
    """
    try:
        sizes = [(path / shard.file).stat().st_size for shard in index.shards]
        return (path / INDEX_NAME).is_file() and sizes == [_shard_bytes(shard, index) for shard in index.shards]
    except OSError:
        return False


def cached_folders(folders: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return, for each corpus folder, the folder to read it from: its whole copy on this node, else the folder itself.

    Args:
        environ: the environment, which names the copies in VARIABLE.
    """
    copies: dict[str, str] = json.loads(environ.get(VARIABLE, "{}"))
    return [
        copies[folder] if folder in copies and is_whole(Path(copies[folder]), read_index(folder)) else folder
        for folder in folders
    ]


def _own_folder(base: Path) -> Path:
    """Return this user's cache folder in `base`; make it if it is missing.

    Raises:
        StorageError: the folder belongs to another user, which is possible where all may write, or it cannot be made.
    """
    path, remedy = base / f"hpctrain-{os.getuid()}", "name another folder with data.stage_folder"
    with storage_errors(path):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if path.is_symlink():
            raise StorageError(f"{path}: is a symbolic link; {remedy}")
        try:
            OwnedFolder(path, private=True).close()
        except UntrustedError as error:
            raise StorageError(f"{path}: {error.reason}; {remedy}") from None
        except NotADirectoryError:
            raise StorageError(f"{path}: is no folder; {remedy}") from None
    return path


def _ready(descriptor: int, path: Path, index: CorpusIndex, clock: Clock, give_up: Callable[[], str | None]) -> bool:
    """Wait for the lock of a copy. Return True, with a shared lock, if the copy is whole. Return False, with an
    exclusive lock, if this process has to make the copy.

    Args:
        descriptor: the open lock file.
        path: folder of the copy.

    Raises:
        HpctrainError: `give_up` returned a reason, or the copy lost files and other processes still use it.
    """
    stuck = 0
    while stuck < STALLED_POLLS:
        if _taken(descriptor, fcntl.LOCK_SH):
            if is_whole(path, index):
                return True
            if _taken(descriptor, fcntl.LOCK_EX):
                return False
            stuck += 1  # users, or another process that is about to copy
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        _check(give_up)
        clock.sleep(POLL_S)
    raise StorageError(f"{path}: is not whole any more, and another run uses it")


def _taken(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _opened_lock(user_folder: Path, name: str) -> int:
    return os.open(user_folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _make_room(user_folder: Path, name: str, size: int) -> None:
    """Make room for a corpus copy of `size` bytes, the folder `name` in `user_folder`: remove the rest of an earlier
    copy of this name, then unused copies of other corpora, the oldest first, until the new copy fits.

    Raises:
        StorageError: the space does not suffice although all unused copies were removed.
    """
    _remove(user_folder, name)
    others = [path for path in user_folder.glob("corpus-*") if path.name != name]
    for path in sorted(others, key=lambda path: path.stat().st_mtime):
        if free_bytes(user_folder) >= size:
            break
        _remove_unused(user_folder, path.name)
    check_disk_space(user_folder, size, "a copy of the data")


def _remove_unused(user_folder: Path, name: str) -> None:
    descriptor = _opened_lock(user_folder, name)
    try:
        if _taken(descriptor, fcntl.LOCK_EX):
            # The lock file stays: another process may have opened it already.
            _remove(user_folder, name)
    finally:
        os.close(descriptor)


def _remove(user_folder: Path, name: str) -> None:
    """Remove the copy `name`, and what unfinished copying left of it."""
    for path in (*user_folder.glob(f".{name}.*.tmp"), user_folder / name):
        shutil.rmtree(path, ignore_errors=True)


def _copy(source: Path, target: Path, index: CorpusIndex, give_up: Callable[[], str | None]) -> None:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(mode=0o700)
    try:
        for shard in index.shards:
            if _copy_file(source / shard.file, temporary / shard.file, give_up) != shard.sha256:
                raise HpctrainError(f"{source / shard.file}: is not what its index says (its hash differs)")
        _copy_file(source / INDEX_NAME, temporary / INDEX_NAME, give_up)
        sync(temporary)
        temporary.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _copy_file(source: Path, target: Path, give_up: Callable[[], str | None]) -> str:
    """Copy a file to disk; return the SHA-256 of the bytes that were read, as hex.

    Raises:
        HpctrainError: `give_up` returned a reason.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with os.fdopen(open_input(source), "rb", buffering=0) as reader, target.open("xb") as writer:
        while count := reader.readinto(buffer):
            _check(give_up)
            digest.update(buffer[:count])
            writer.write(buffer[:count])
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()


def _check(give_up: Callable[[], str | None]) -> None:
    reason = give_up()
    if reason is not None:
        raise HpctrainError(reason)


def _shard_bytes(shard: Shard, index: CorpusIndex) -> int:
    return shard.tokens * np.dtype(index.dtype).itemsize
