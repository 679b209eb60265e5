"""The door to files of this user's own: with two users, shared groups, links, FIFOs, and folders that change places."""

from __future__ import annotations

import grp
import os
import pwd
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from two_users import ME, OTHER, PROJECT, as_user, give, shared_space

from hpctrain.base.errors import InputError, UntrustedError
from hpctrain.base.owned_files import (
    TRUSTED_GROUPS_VARIABLE,
    OwnedFolder,
    is_private_group,
    open_owned,
    read_owned,
    read_private,
)


@pytest.fixture
def space() -> Iterator[Path]:
    """A folder that everybody can write to, as /tmp."""
    with shared_space() as path:
        yield path


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """A FIFO that is waited for ends the test and not the suite."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def make(folder: Path, uid: int = ME, mode: int = 0o755, file_mode: int = 0o644) -> Path:
    folder.mkdir()
    (folder / "file").write_bytes(b"content")
    (folder / "file").chmod(file_mode)
    give(folder, uid)
    folder.chmod(mode)
    return folder


def read_as_me(path: Path, groups: tuple[int, ...] = ()) -> bytes:
    return as_user(ME, lambda: read_owned(path), groups)


def refusal(path: Path, uid: int = ME) -> UntrustedError:
    with pytest.raises(UntrustedError) as caught:
        as_user(uid, lambda: read_owned(path))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value


pytestmark = pytest.mark.requires("root")


def test_what_is_mine_is_read_wherever_it_lies(space: Path) -> None:
    assert read_as_me(make(space / "mine") / "file") == b"content"


def test_a_project_s_setgid_space_may_hold_my_folder() -> None:
    with shared_space(0o2775, group=PROJECT) as project:
        folder = project / "mine"

        def create() -> None:
            folder.mkdir(mode=0o700)
            (folder / "file").write_bytes(b"content")

        as_user(ME, create, (PROJECT,))
        assert folder.stat().st_gid == PROJECT
        assert read_as_me(folder / "file", (PROJECT,)) == b"content"


def test_another_users_folder_is_refused_though_the_file_is_mine(space: Path) -> None:
    folder = make(space / "theirs", OTHER, 0o777)
    os.chown(folder / "file", ME, ME)
    folder.chmod(0o755)
    assert refusal(folder / "file").reason == f"belongs to another user (uid {OTHER})"


def test_another_users_file_in_my_folder_is_refused(space: Path) -> None:
    folder = make(space / "mine")
    os.chown(folder / "file", OTHER, OTHER)
    assert "file: belongs to another user" in str(refusal(folder / "file"))


def test_a_hard_link_in_another_users_folder_to_my_file_is_refused(space: Path) -> None:
    folder = make(space / "theirs", OTHER)
    (folder / "file").unlink()
    os.link(make(space / "mine") / "file", folder / "file")
    assert "theirs: belongs to another user" in str(refusal(folder / "file"))


def test_another_users_closed_folder_is_refused_for_being_theirs(space: Path) -> None:
    assert refusal(make(space / "theirs", OTHER, 0o700) / "file").reason == f"belongs to another user (uid {OTHER})"


def test_root_s_folder_is_not_mine_nor_is_mine_root_s(space: Path) -> None:
    assert "belongs to another user (uid 0)" in str(refusal(make(space / "roots", 0) / "file"))
    with pytest.raises(UntrustedError, match=rf"belongs to another user \(uid {ME}\)"):
        read_owned(make(space / "mine") / "file")


@pytest.mark.parametrize(("mode", "file_mode"), [(0o777, 0o644), (0o1777, 0o600), (0o755, 0o666), (0o700, 0o602)])
def test_what_everybody_can_write_to_is_refused(space: Path, mode: int, file_mode: int) -> None:
    path = make(space / "mine", ME, mode, file_mode) / "file"
    assert "can be written by others" in refusal(path).reason
    assert "chmod -R go-rwx" in str(refusal(path))


@pytest.mark.parametrize(("mode", "file_mode"), [(0o770, 0o600), (0o2775, 0o600), (0o750, 0o660)])
def test_a_shared_group_may_not_write_unless_it_is_trusted_by_name(
    space: Path, mode: int, file_mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(space / "mine", ME, mode, file_mode) / "file"
    for item in (path.parent, path):
        os.chown(item, ME, PROJECT)
    path.parent.chmod(mode)
    assert f"can be written by group {PROJECT}" in refusal(path).reason
    assert f"set {TRUSTED_GROUPS_VARIABLE}={PROJECT}" in str(refusal(path))
    monkeypatch.setenv(TRUSTED_GROUPS_VARIABLE, f"staff, {PROJECT}")
    assert read_as_me(path) == b"content"
    monkeypatch.setenv(TRUSTED_GROUPS_VARIABLE, "staff")
    assert f"can be written by group {PROJECT}" in refusal(path).reason


def test_in_a_closed_folder_the_group_of_a_file_does_not_matter(space: Path) -> None:
    path = make(space / "mine", ME, 0o700, 0o660) / "file"
    os.chown(path, ME, PROJECT)
    assert read_as_me(path) == b"content"


GROUPS: dict[str, tuple[str, list[str], list[str]]] = {
    "private": ("me", [], []),
    "private and listed": ("me", ["me"], []),
    "with another member": ("me", ["other"], []),
    "another one's primary": ("me", [], ["other"]),
    "of another name": ("users", [], []),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_group_is_private_when_nobody_else_is_in_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, members, primaries = GROUPS[kind]
    me = pwd.struct_passwd(("me", "x", os.getuid(), 77, "", "/", "/bin/sh"))
    others = [pwd.struct_passwd((other, "x", 4000, 77, "", "/", "/bin/sh")) for other in primaries]
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(pwd, "getpwall", lambda: [me, *others])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, members)))
    assert is_private_group(77) == kind.startswith("private")
    assert not is_private_group(78)


def test_a_group_that_nobody_knows_is_not_private(space: Path) -> None:
    path = make(space / "mine", ME, 0o770) / "file"
    assert f"can be written by group {ME}" in refusal(path).reason


def test_a_private_group_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "mine", os.getuid(), 0o2770, 0o664)
    monkeypatch.setattr("hpctrain.base.owned_files.is_private_group", lambda gid: gid == os.getgid())
    assert read_owned(folder / "file") == b"content"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    (path.parent / "real").write_bytes(b"content")
    path.symlink_to("real")


def folder_in_its_place(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("put", "kind"), [(fifo, "a FIFO"), (link, "a symbolic link"), (folder_in_its_place, "a folder")]
)
def test_what_is_no_regular_file_is_refused_at_once(space: Path, put: Callable[[Path], None], kind: str) -> None:
    folder = make(space / "mine")
    (folder / "file").unlink()
    put(folder / "file")
    give(folder, ME)
    assert refusal(folder / "file").reason.startswith(f"is {kind}")


def test_a_device_is_refused(space: Path) -> None:
    folder = make(space / "mine")
    (folder / "file").unlink()
    os.mknod(folder / "file", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    give(folder, ME)
    assert refusal(folder / "file").reason.startswith("is a device")


def test_links_on_the_way_lead_to_my_folder(space: Path) -> None:
    make(space / "mine")
    (space / "way").mkdir()
    (space / "way" / "runs").symlink_to(space)
    (space / "mylink").symlink_to("mine")
    os.chown(space / "mylink", ME, ME, follow_symlinks=False)
    assert read_as_me(space / "way" / "runs" / "mine" / "file") == b"content"
    assert read_as_me(space / "mylink" / "file") == b"content"


def test_somebody_else_s_link_to_my_folder_is_refused() -> None:
    # Without the sticky bit, where the kernel itself follows such a link.
    with shared_space(0o777) as space:
        make(space / "mine")
        (space / "bait").symlink_to("mine")
        os.chown(space / "bait", OTHER, OTHER, follow_symlinks=False)
        assert "is a symbolic link of another user's" in str(refusal(space / "bait" / "file"))


def test_the_check_is_made_on_what_was_opened(space: Path) -> None:
    """After the folder is open, another one in its place is neither believed nor read."""
    make(space / "mine")
    theirs = make(space / "theirs", OTHER)
    (theirs / "file").write_bytes(b"hostile")

    def read() -> bytes:
        with OwnedFolder(space / "mine") as folder:
            (space / "mine").rename(space / "aside")
            (space / "mine").symlink_to("theirs")
            return folder.read("file")

    assert as_user(ME, read) == b"content"


@pytest.mark.slow
def test_a_folder_that_changes_places_all_the_time_never_gives_a_hostile_byte() -> None:
    with shared_space(0o777) as space:
        make(space / "mine")
        theirs = make(space / "theirs", OTHER)
        (theirs / "file").write_bytes(b"hostile")
        path, aside = space / "mine", space / "aside"
        swapper = os.fork()
        if swapper == 0:
            try:
                while True:
                    path.rename(aside)
                    theirs.rename(path)
                    path.rename(theirs)
                    aside.rename(path)
            finally:
                os._exit(1)

        def outcomes() -> set[bytes]:
            seen = set()
            for _ in range(3000):
                try:
                    seen.add(read_owned(path / "file"))
                except (UntrustedError, FileNotFoundError):
                    continue
            return seen

        try:
            assert as_user(ME, outcomes) <= {b"content"}
        finally:
            os.kill(swapper, signal.SIGKILL)
            os.waitpid(swapper, 0)


def test_a_tree_is_looked_at_to_its_leaves(space: Path) -> None:
    folder = make(space / "mine")
    (folder / "code" / "models").mkdir(parents=True)
    (folder / "code" / "models" / "own.py").write_text("")
    (folder / "code" / "link.py").symlink_to("models/own.py")
    give(folder, ME)

    def look() -> None:
        with OwnedFolder(folder) as opened:
            opened.check_tree("code")

    as_user(ME, look)
    os.chown(folder / "code" / "models" / "own.py", OTHER, OTHER)
    with pytest.raises(UntrustedError, match=rf"code/models/own\.py: belongs to another user \(uid {OTHER}\)"):
        as_user(ME, look)
    (folder / "code").rename(folder / "real")
    (folder / "code").symlink_to("real")
    with pytest.raises(UntrustedError, match=r"code: is a symbolic link"):
        as_user(ME, look)


def test_a_private_file_may_lie_anywhere_and_be_read_by_nobody(space: Path) -> None:
    path = make(space / "mine", ME, 0o755, 0o600) / "file"
    os.chown(path.parent, 0, 0)
    assert as_user(ME, lambda: read_private(path, 100)) == b"content"
    path.chmod(0o640)
    with pytest.raises(UntrustedError, match=r"can be read by others \(mode 640\)"):
        as_user(ME, lambda: read_private(path, 100))


@pytest.mark.parametrize("name", ["", ".", "..", "../file", "sub/file", "/etc/passwd", "a\0b"])
def test_only_plain_names_are_opened(tmp_path: Path, name: str) -> None:
    with OwnedFolder(make(tmp_path / "mine", os.getuid())) as folder, pytest.raises(UntrustedError, match="plain"):
        folder.open(name)


def test_nothing_stays_open(space: Path) -> None:
    paths = [make(space / "theirs", OTHER) / "file", make(space / "mine", os.getuid(), 0o777) / "file"]
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in paths:
        for attempt in (open_owned, read_owned):
            with pytest.raises(UntrustedError):
                attempt(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@given(
    uid=st.sampled_from([0, ME]), mode=st.integers(0, 0o7777), file_uid=st.sampled_from([0, ME]),
    file_mode=st.integers(0, 0o7777), kind=st.sampled_from(["file", "fifo", "link", "folder", "none"]),
)  # fmt: skip
def test_any_folder_is_read_or_refused_by_the_rule(
    uid: int, mode: int, file_uid: int, file_mode: int, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As root, whom no mode keeps out: what is read is mine, and nobody beside me and root's group can write to it."""
    folder = tmp_path_factory.mktemp("any")
    path = folder / "file"
    match kind:
        case "file":
            path.write_bytes(b"content")
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/etc/passwd")
        case "folder":
            path.mkdir()
    if kind not in ("none", "link"):
        os.chown(path, file_uid, PROJECT)
        path.chmod(file_mode)
    os.chown(folder, uid, PROJECT)
    folder.chmod(mode)
    closed = not mode & 0o077
    mine = uid == 0 and not mode & 0o022 and file_uid == 0 and not file_mode & 0o002
    trusted = kind == "file" and mine and (closed or not file_mode & 0o020)
    try:
        assert read_owned(path) == b"content"
        assert trusted
    except InputError:
        assert not trusted
    except FileNotFoundError:
        assert kind == "none"
