"""Whether a file can be what this user wrote: nobody else may own it or be able to write to it."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator

TRUSTED_GROUPS_VARIABLE = "HPCTRAIN_TRUSTED_GROUPS"
"""Environment variable: names or ids of groups, with commas between, whose members may write what this user runs."""

_GROUP_WRITE, _WORLD_WRITE = 0o020, 0o002


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """What this process and those that it starts write meanwhile is for its owner alone, wherever it lies."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def distrust(status: os.stat_result, *, private: bool = False, guarded: bool = False) -> str | None:
    """The reason not to trust a file, as the end of a sentence that begins with its path; None: it is trusted.

    Args:
        status: of what was opened, so that nothing else can be put in its place after the check.
        private: nobody else may be able to read it either.
        guarded: it lies in a folder that nobody else can enter, so the bits of its group let nobody in.
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
    """Whether the members of a group may write what this user runs: it is private, or the user trusts it by name."""
    trusted = {name.strip() for name in os.environ.get(TRUSTED_GROUPS_VARIABLE, "").split(",")}
    return str(gid) in trusted or group_name(gid) in trusted or is_private_group(gid)


def is_private_group(gid: int) -> bool:
    """Whether this user is the only member of the group.

    Directory services do not list all their users, so the absence of other members proves nothing by itself: the group
    must also be this user's primary one and carry the user's name, as systems with a group for each user have it.
    """
    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if me.pw_gid != gid or group.gr_name != me.pw_name or set(group.gr_mem) - {me.pw_name}:
        return False
    return all(user.pw_uid == me.pw_uid for user in pwd.getpwall() if user.pw_gid == gid)


def group_name(gid: int) -> str:
    """Name of a group; its number where it has no name here."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
