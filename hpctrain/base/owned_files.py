"""The one door to files that are believed or run because this user wrote them: run folders, checkpoints, tokens.

Everything is opened first and checked then, on its descriptor, so nothing can be put in its place between the check and
the reading. Folders above may therefore be root's, or a project's that its group can write to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from types import TracebackType

from hpctrain.base.errors import FileError, UntrustedError
from hpctrain.base.regular_file import kind_of, open_regular, read_descriptor
from hpctrain.base.trust import TRUSTED_GROUPS_VARIABLE, distrust, group_name

OWN_BYTES_MAX = 1 << 30
"""Largest file of this user's own that is read into memory at once: metrics of a few million steps."""

_OTHER_OWNER_REMEDY = "hpctrain uses only what is yours, as it would run as you"
_SYMLINK_REMEDY = "put what it leads to in its place, or remove it"
_WRITE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC


class OwnedFolder:
    """An open folder of this user's that nobody else can write to. What lies in it is opened from its descriptor.

    The path may lead through symbolic links, and may be one itself if this user or root made it.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        """
        Args:
            private: nobody else may be able to read it either.

        Raises:
            UntrustedError: it is somebody else's, or others can write to it.
            OSError: it is not there, or is no folder.
        """
        self.path = path
        self.descriptor = _opened_folder(path)
        try:
            status = os.fstat(self.descriptor)
            _check(path, status, private=private)
        except BaseException:
            self.close()
            raise
        self._guarded = not status.st_mode & 0o077

    def __enter__(self) -> OwnedFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder; what was opened in it stays open."""
        os.close(self.descriptor)

    def names(self) -> list[str]:
        """Names of everything that lies in it, in order."""
        with os.scandir(self.descriptor) as entries:
            return sorted(entry.name for entry in entries)

    def open(self, name: str, *, private: bool = False) -> int:
        """A descriptor for reading a regular file of this user's that lies in the folder itself.

        Raises:
            UntrustedError: it is somebody else's, others can write to it, or it is no regular file.
            OSError: it is not there, or cannot be read.
        """
        path = self.path / _plain(name, self.path)
        return _checked_file(path, name, self.descriptor, private=private, guarded=self._guarded)

    def read(self, name: str, limit_bytes: int = OWN_BYTES_MAX, *, private: bool = False) -> bytes:
        """All bytes of such a file.

        Raises:
            UntrustedError: as for `open`.
            FileError: it is larger than the limit.
            OSError: it is not there, or cannot be read.
        """
        descriptor = self.open(name, private=private)
        try:
            return read_descriptor(descriptor, self.path / name, limit_bytes)
        finally:
            os.close(descriptor)

    def open_to_write(self, name: str) -> int:
        """A descriptor for reading and writing a regular file of this user's in the folder, made if it is not there.

        Raises:
            UntrustedError: as for `open`.
            OSError: it cannot be made or written.
        """
        path = self.path / _plain(name, self.path)
        try:
            descriptor = os.open(name, _WRITE_FLAGS, 0o600, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UntrustedError(path, "is a symbolic link", _SYMLINK_REMEDY) from None
        return _checked(descriptor, path, private=False, guarded=self._guarded)

    def check_entries(self) -> None:
        """Look at everything that lies in the folder itself; a link may lead only to a folder.

        Raises:
            UntrustedError: something is somebody else's, others can write to it, or it is no file and no folder.
            OSError: it cannot be looked at.
        """
        for name in self.names():
            with contextlib.suppress(FileNotFoundError):  # a process that uses the folder renames its temporary files
                self._check_entry(name)

    def _check_entry(self, name: str) -> None:
        status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        path, is_link = self.path / name, stat.S_ISLNK(status.st_mode)
        if is_link and status.st_uid == os.getuid():
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=self.descriptor)
        expected = stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and not is_link)
        if not expected:
            kind = "a symbolic link" if is_link else kind_of(status.st_mode)
            raise UntrustedError(path, f"is {kind}, expected a regular file", _SYMLINK_REMEDY)
        _check(path, status, guarded=self._guarded and not is_link)

    def check_tree(self, name: str, no_links: tuple[str, ...] = ()) -> None:
        """Look at a folder in it and at all that lies below, without opening a file.

        Symbolic links below are not followed; only who can write to their folder can have made them.

        Args:
            no_links: suffixes of files that may be no symbolic links.

        Raises:
            UntrustedError: something is somebody else's, or others can write to it.
            OSError: it is not there, or cannot be looked at.
        """
        top = os.stat(_plain(name, self.path), dir_fd=self.descriptor, follow_symlinks=False)
        if not stat.S_ISDIR(top.st_mode):
            raise UntrustedError(
                self.path / name, f"is {kind_of(top.st_mode) or 'a file'}, expected a folder", _SYMLINK_REMEDY
            )
        for below, folders, files, descriptor in os.fwalk(name, dir_fd=self.descriptor, onerror=_raise):
            place = self.path / below
            _check(place, os.fstat(descriptor), guarded=self._guarded)
            for entry in (*folders, *files):
                status = os.stat(entry, dir_fd=descriptor, follow_symlinks=False)
                if not stat.S_ISLNK(status.st_mode):
                    _check(place / entry, status, guarded=self._guarded)
                elif status.st_uid != os.getuid() or Path(entry).suffix in no_links:
                    raise UntrustedError(place / entry, "is a symbolic link", _SYMLINK_REMEDY)


def open_owned(path: Path, *, private: bool = False) -> int:
    """A descriptor for reading a regular file of this user's that lies in a folder of this user's.

    Raises:
        UntrustedError: one of the two is somebody else's, others can write to it, or the file is no regular one.
        OSError: it is not there, or cannot be read.
    """
    with OwnedFolder(path.parent) as folder:
        return folder.open(path.name, private=private)


def read_owned(path: Path, limit_bytes: int = OWN_BYTES_MAX, *, private: bool = False) -> bytes:
    """All bytes of such a file.

    Raises:
        UntrustedError: as for `open_owned`.
        FileError: it is larger than the limit.
        OSError: it is not there, or cannot be read.
    """
    with OwnedFolder(path.parent) as folder:
        return folder.read(path.name, limit_bytes, private=private)


def read_private(path: Path, limit_bytes: int) -> bytes:
    """All bytes of a file that nobody but this user can read or write, wherever it lies.

    Raises:
        UntrustedError: others can read it or write to it, it is somebody else's, or no regular file.
        FileError: it is larger than the limit.
        OSError: it is not there, or cannot be read.
    """
    descriptor = _checked_file(path, str(path), None, private=True, guarded=False)
    try:
        return read_descriptor(descriptor, path, limit_bytes)
    finally:
        os.close(descriptor)


def _opened_folder(path: Path) -> int:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.getuid(), 0):
        raise UntrustedError(path, f"is a symbolic link of another user's (uid {status.st_uid})", _OTHER_OWNER_REMEDY)
    try:
        return os.open(path, _FOLDER_FLAGS)
    except PermissionError:
        # What may not be opened is somebody else's as a rule, and that is the better reason.
        _check(path, path.stat())
        raise


def _checked_file(path: Path, name: str, dir_fd: int | None, *, private: bool, guarded: bool) -> int:
    try:
        descriptor = open_regular(name, dir_fd=dir_fd)
    except FileError as error:
        reason, _, remedy = error.mistakes[0].text.partition("; ")
        raise UntrustedError(path, reason, remedy) from None
    except PermissionError:
        _check(path, os.stat(name, dir_fd=dir_fd, follow_symlinks=False), private=private, guarded=guarded)
        raise
    return _checked(descriptor, path, private=private, guarded=guarded)


def _checked(descriptor: int, path: Path, *, private: bool, guarded: bool) -> int:
    """The descriptor, if it is a regular file's that this user may believe; it is closed otherwise."""
    try:
        status = os.fstat(descriptor)
        kind = kind_of(status.st_mode)
        if kind is not None:
            raise UntrustedError(path, f"is {kind}, expected a regular file", _SYMLINK_REMEDY)
        _check(path, status, private=private, guarded=guarded)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, status: os.stat_result, *, private: bool = False, guarded: bool = False) -> None:
    reason = distrust(status, private=private, guarded=guarded)
    if reason is None:
        return
    if status.st_uid != os.getuid():
        raise UntrustedError(path, reason, _OTHER_OWNER_REMEDY)
    remedy = "it would run as you: look at what is in it, then chmod -R go-rwx"
    if "group" in reason:
        remedy += f", or set {TRUSTED_GROUPS_VARIABLE}={group_name(status.st_gid)} if you trust all of them"
    raise UntrustedError(path, reason, remedy)


def _plain(name: str, folder: Path) -> str:
    """The name, if it leads nowhere else."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UntrustedError(folder, f"names {name!r}, which is no plain file name", "it was not written by hpctrain")
    return name


def _raise(error: OSError) -> None:
    raise error
