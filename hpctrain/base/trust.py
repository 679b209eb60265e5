"""Whether a file can be trusted as this user's: nobody else may own it or be able to write to it."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator

TRUSTED_GROUPS_VARIABLE = "HPCTRAIN_TRUSTED_GROUPS"
"""Environment variable with names or ids of groups, separated by commas, whose members may write what this user
runs."""

_GROUP_WRITE, _WORLD_WRITE = 0o020, 0o002


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Set the umask in the `with` block: only the owner can access new files of this process and its children."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def distrust(status: os.stat_result, *, private: bool = False, guarded: bool = False) -> str | None:
    """Return why a file is not trusted, as the end of a sentence that begins with its path; None: it is trusted.

    Args:
        status: status of the open file, so that nothing can replace it after the check.
        private: whether others must not be able to read it either.
        guarded: whether it lies in a folder that nobody else can enter, so its group bits give no access.
    """
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid():
        return f"belongs to another user (uid {status.st_uid})"
    if mode & _WORLD_WRITE:
        return f"can be written by others (mode {mode:03o})"
    if mode & _GROUP_WRITE and not guarded and not is_trusted_group(status.st_gid):
        return f"can be written by group {group_name(status.st_gid)} (mode {mode:03o})"
    if private and not guarded and mode & 0o077:
        return f"can be read by others (mode {mode:03o})"
    return None


def is_trusted_group(gid: int) -> bool:
    """Whether the members of a group may write what this user runs: the group is private, or the user named it."""
    trusted = {name.strip() for name in os.environ.get(TRUSTED_GROUPS_VARIABLE, "").split(",")}
    return str(gid) in trusted or group_name(gid) in trusted or is_private_group(gid)


def is_private_group(gid: int) -> bool:
    """Whether this user is the only member of the group.

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
    """Return the name of a group; its number where it has no name here."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
