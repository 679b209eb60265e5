"""The folder DIR.partial, in which the corpus folder DIR is made. A killed command leaves DIR.partial behind, and the
same command resumes from it.

DIR.partial holds four things:

- `work.json`: the command that made the folder.
- `lock`: locked while the command runs.
- `SOURCE/`: finished work of each source: a file with the scan of each work unit (counts, and a sample for the
  tokenizer), and a folder with the token shards of each work unit.
- `corpus/`: the new corpus, which is renamed to DIR at the end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import storage_errors, swap, sync, write_json
from hpctrain.base.errors import InputError, StorageError
from hpctrain.corpus.input.inputs import InputFile, json_object

WORK_NAME = "work.json"
_CORPUS = "corpus"


@contextlib.contextmanager
def work_folder(folder: Path, command: Mapping[str, Any], force: bool) -> Iterator[Path]:
    """Yield the folder DIR.partial for the corpus folder DIR (`folder`), with the earlier work of the same command.
    After a kill, an interrupt or a StorageError in the `with` block, DIR.partial stays, so that the command can resume.
    An InputError in the block removes it, because the user will change the command, and only an equal command could
    resume.

    Args:
        command: everything that determines the result, as JSON values.
        force: whether to remove the unfinished work of another command.

    Raises:
        InputError: DIR.partial holds work of another command and `force` is false, or a command is using it now.
        StorageError: DIR.partial cannot be written; finished work remains.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
        with _locked(partial, folder):
            _claim(partial, folder, command, force)
            try:
                yield partial
            except StorageError as error:
                raise StorageError(f"{error}; what is finished stays in {partial}: the same command goes on") from error
            except InputError:
                # A corrected input or an added option makes another command, which this work would only block.
                shutil.rmtree(partial, ignore_errors=True)
                raise


def publish(partial: Path, folder: Path) -> None:
    """Rename the folder `corpus` in `partial` to `folder`, in place of a corpus there, and remove `partial`.

    Raises:
        OSError: the folder cannot be renamed.
    """
    sync(partial / _CORPUS)
    swap(partial / _CORPUS, folder)
    sync(folder.parent)
    shutil.rmtree(partial, ignore_errors=True)


def new_corpus(partial: Path) -> Path:
    """Return an empty folder for the new corpus within DIR.partial (`partial`)."""
    corpus = partial / _CORPUS
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir()
    return corpus


def files_fingerprint(files: Sequence[InputFile]) -> str:
    """Return a hash of the files' paths, formats, sizes and modification times. Finished work is used again only for
    files with an equal hash."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(os.fsencode(f"{file.path.resolve()}\0{file.format}"))
        with contextlib.suppress(OSError):
            status = file.path.stat()
            digest.update(f"\0{status.st_size}\0{status.st_mtime_ns}".encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _claim(partial: Path, folder: Path, command: Mapping[str, Any], force: bool) -> None:
    """Prepare the folder DIR.partial (`partial`) of the corpus folder DIR for this command: keep the work of an equal
    command, remove the work of another one if `force` is true, else raise an InputError."""
    if (partial / WORK_NAME).exists():
        differs = _difference(partial / WORK_NAME, command)
        if not differs:
            return
        if not force:
            raise InputError(
                f"-o {folder}: {partial} holds unfinished work of another command ({differs} differs); give that "
                f"command again to go on with it, or add --force to drop it"
            )
    else:
        foreign = sorted(path.name for path in partial.iterdir() if path.name != "lock" and path.suffix != ".tmp")
        if foreign:
            raise InputError(f"{partial}: found {foreign[0]} and no {WORK_NAME}; move it away, or name another -o")
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
    write_json(partial / WORK_NAME, command)


def _difference(path: Path, command: Mapping[str, Any]) -> str:
    """Return the keys in which the command in the file `path` differs from `command`, separated by commas; '' if the
    commands are equal, and `WORK_NAME` if the file holds no command."""
    earlier = json_object(path)
    if not earlier:
        return WORK_NAME
    return ", ".join(key for key in {**command, **earlier} if command.get(key) != earlier.get(key))


@contextlib.contextmanager
def _locked(partial: Path, folder: Path) -> Iterator[None]:
    """Hold the lock of the folder DIR.partial (`partial`) in the `with` block. On a file system without locks, go on
    without one.

    Raises:
        InputError: another command holds the lock.
    """
    descriptor = os.open(partial / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"-o {folder}: another command is making this corpus now; wait for it") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
        yield
    finally:
        os.close(descriptor)
