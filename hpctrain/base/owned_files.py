"""Opens files that hpctrain trusts or executes because this user wrote them: run folders, checkpoints, secrets. All
access to such files goes through this module. A file is trusted if it belongs to this user and nobody else can write to
it, except for groups that `is_trusted_group` accepts.

Every file and folder is opened first and then checked on its descriptor, so nothing can replace it between the check
and the read. So the folders above the file's own folder may belong to root, or be writable by the group of a project.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from hpctrain.base.errors import FileError, InputError, UntrustedError
from hpctrain.base.regular_file import kind_of, open_regular, read_and_close

TRUSTED_GROUPS_VARIABLE = "HPCTRAIN_TRUSTED_GROUPS"
"""Environment variable with names or ids of groups, separated by commas, whose members may write to the files that this
user runs."""
OWN_BYTES_MAX = 1 << 30
"""Largest file of this user that is read whole into memory, in bytes; metrics of a few million steps are as large."""

_OTHER_OWNER_REMEDY = "hpctrain uses only what is yours, as it would run as you"
_SYMLINK_REMEDY = "put what it leads to in its place, or remove it"
_GROUP_WRITE, _WORLD_WRITE = 0o020, 0o002
_WRITE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC


class OwnedFolder:
    """An open folder of this user that nobody else can write to. Its files are opened relative to its descriptor.

    The folder's path may contain symbolic links, and may be one itself if this user or root made the link.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        """Open the folder.

        Args:
            private: whether others must not be able to read the folder either.

        Raises:
            UntrustedError: the folder belongs to another user, others can write to it, or with `private` others can
                read it.
            OSError: the folder does not exist, or the path is no folder.
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
        """Close the folder; files that were opened in it stay open."""
        os.close(self.descriptor)

    def names(self) -> list[str]:
        """Return the names of all entries of the folder, sorted."""
        with os.scandir(self.descriptor) as entries:
            return sorted(entry.name for entry in entries)

    def open(self, name: str, *, private: bool = False) -> int:
        """Return a descriptor for reading the regular file `name` of this user, which lies in the folder itself.

        Args:
            private: whether others must not be able to read the file either.

        Raises:
            UntrustedError: `name` is no plain file name, the file belongs to another user, others can write to it, it
                is no regular file, or with `private` others can read it.
            OSError: the file does not exist, or cannot be read.
        """
        path = self.path / _plain(name, self.path)
        return _checked_file(path, name, self.descriptor, private=private, guarded=self._guarded)

    def read(self, name: str, limit_bytes: int = OWN_BYTES_MAX, *, private: bool = False) -> bytes:
        """Return all bytes of the regular file `name` of this user, which lies in the folder itself.

        Args:
            private: whether others must not be able to read the file either.

        Raises:
            UntrustedError: `name` is no plain file name, the file belongs to another user, others can write to it, it
                is no regular file, or with `private` others can read it.
            FileError: the file is larger than `limit_bytes`.
            OSError: the file does not exist, or cannot be read.
        """
        return read_and_close(self.open(name, private=private), self.path / name, limit_bytes)

    def open_to_write(self, name: str) -> int:
        """Return a descriptor for reading and writing the regular file `name` of this user in the folder; create a
        missing file.

        Raises:
            UntrustedError: `name` is no plain file name, the file belongs to another user, others can write to it, or
                it is no regular file.
            OSError: the file cannot be made or written.
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
        """Check who owns and can write each entry of the folder, but not what is in its subfolders. An entry may be a
        symbolic link only to a folder, because a file is opened without following a link.

        Raises:
            UntrustedError: an entry belongs to another user, others can write to it, or it is neither a file nor a
                folder.
            OSError: an entry cannot be checked.
        """
        for name in self.names():
            with contextlib.suppress(FileNotFoundError):  # another process has renamed a temporary file
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
        """Check who owns and can write the subfolder `name` and everything below it, without opening a file.

        Symbolic links below it are not followed; the links themselves must belong to this user.

        Args:
            no_links: suffixes of files that must not be symbolic links.

        Raises:
            UntrustedError: `name` is no folder, an entry belongs to another user, others can write to it, or a link is
                not allowed.
            OSError: the subfolder does not exist, or cannot be checked.
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
    """Return a descriptor for reading a regular file of this user in a folder of this user.

    Args:
        private: whether others must not be able to read the file either.

    Raises:
        UntrustedError: the file or its folder belongs to another user, others can write to one of them, the file is not
            regular, or with `private` others can read the file.
        OSError: the file or its folder does not exist, or cannot be read.
    """
    with OwnedFolder(path.parent) as folder:
        return folder.open(path.name, private=private)


def read_owned(path: Path, limit_bytes: int = OWN_BYTES_MAX, *, private: bool = False) -> bytes:
    """Return all bytes of a regular file of this user in a folder of this user.

    Args:
        private: whether others must not be able to read the file either.

    Raises:
        UntrustedError: the file or its folder belongs to another user, others can write to one of them, the file is not
            regular, or with `private` others can read the file.
        FileError: the file is larger than `limit_bytes`.
        OSError: the file or its folder does not exist, or cannot be read.
    """
    with OwnedFolder(path.parent) as folder:
        return folder.read(path.name, limit_bytes, private=private)


def read_private(path: Path, limit_bytes: int) -> bytes:
    """Return all bytes of a file, in any folder, that only this user can read or write.

    Raises:
        UntrustedError: others can read the file or write to it, it belongs to another user, or it is no regular file.
        FileError: the file is larger than `limit_bytes`.
        OSError: the file does not exist, or cannot be read.
    """
    return read_and_close(_checked_file(path, str(path), None, private=True, guarded=False), path, limit_bytes)


def read_private_text(path: Path, limit_bytes: int, key: str) -> str:
    """Return the text of a file that only this user can read or write.

    Args:
        key: the key of the run file that names the file, for the error.

    Raises:
        InputError: others can read the file or write to it, or it cannot be read.
        FileError: the file is larger than `limit_bytes`.
    """
    try:
        return read_private(path, limit_bytes).decode()
    except UntrustedError as error:
        raise InputError(f"{key}: {path}: {error.reason}; allowed is your own alone: chmod 600 {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(f"{key}: {path}: cannot read: {reason}") from None


def _opened_folder(path: Path) -> int:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.getuid(), 0):
        raise UntrustedError(path, f"is a symbolic link of another user's (uid {status.st_uid})", _OTHER_OWNER_REMEDY)
    try:
        return os.open(path, _FOLDER_FLAGS)
    except PermissionError:
        # A folder that cannot be opened usually belongs to another user, which is the better reason to give.
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
    """Return the descriptor if its file is regular and trusted (see `_check`); else close it and raise UntrustedError.

    Args:
        path: path of the file, for errors.
        private: whether others must not be able to read the file either.
        guarded: whether the file lies in a folder that nobody else can enter, so that its group bits give no access.
    """
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
    """Raise UntrustedError if a file or folder is not trusted.

    Args:
        status: status of the open file, so that nothing can replace the file after the check.
        private: whether others must not be able to read the file either.
        guarded: whether the file lies in a folder that nobody else can enter, so that its group bits give no access.
    """
    mode, remedy = stat.S_IMODE(status.st_mode), "it would run as you: look at what is in it, then chmod -R go-rwx"
    if status.st_uid != os.getuid():
        reason, remedy = f"belongs to another user (uid {status.st_uid})", _OTHER_OWNER_REMEDY
    elif mode & _WORLD_WRITE:
        reason = f"can be written by others (mode {mode:03o})"
    elif mode & _GROUP_WRITE and not guarded and not is_trusted_group(status.st_gid):
        group = group_name(status.st_gid)
        reason = f"can be written by group {group} (mode {mode:03o})"
        remedy += f", or set {TRUSTED_GROUPS_VARIABLE}={group} if you trust all of them"
    elif private and not guarded and mode & 0o077:
        reason = f"can be read by others (mode {mode:03o})"
    else:
        return
    raise UntrustedError(path, reason, remedy)


def _plain(name: str, folder: Path) -> str:
    """Return `name` if it names an entry of the folder itself, without a path; else raise UntrustedError."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UntrustedError(folder, f"names {name!r}, which is no plain file name", "it was not written by hpctrain")
    return name


def _raise(error: OSError) -> None:
    raise error


class _Umask:
    """The umask of this process, which all its threads share, while blocks of `owner_only` are open."""

    lock = threading.Lock()
    blocks = 0
    before = 0
    """The umask before the first of the open blocks."""


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Set the umask in the `with` block, so that only the owner can access new files of this process and its
    children. Blocks of several threads may overlap: the end of the last one sets the umask back."""
    with _Umask.lock:
        if _Umask.blocks == 0:
            _Umask.before = os.umask(0o077)
        _Umask.blocks += 1
    try:
        yield
    finally:
        with _Umask.lock:
            _Umask.blocks -= 1
            if _Umask.blocks == 0:
                os.umask(_Umask.before)


def is_trusted_group(gid: int) -> bool:
    """Return whether the members of a group may write what this user runs: this user is the only member
    (`is_private_group`), or TRUSTED_GROUPS_VARIABLE names the group."""
    trusted = {name.strip() for name in os.environ.get(TRUSTED_GROUPS_VARIABLE, "").split(",")}
    return str(gid) in trusted or group_name(gid) in trusted or is_private_group(gid)


def is_private_group(gid: int) -> bool:
    """Return whether this user is the only member of the group.

    Directory services do not list all their users, so an empty member list proves nothing by itself. The group must
    also be this user's primary group and have the user's name, as on systems with a group for each user.
    """
    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if me.pw_gid != gid or group.gr_name != me.pw_name or set(group.gr_mem) - {me.pw_name}:
        return False
    return all(user.pw_uid == me.pw_uid for user in pwd.getpwall() if user.pw_gid == gid)


def group_name(gid: int) -> str:
    """Return the name of a group; the number `gid` as text if this machine knows no name for it."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
