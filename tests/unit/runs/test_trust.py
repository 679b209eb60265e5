"""A run folder is its owner's alone, and is not used when it stopped being so."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import pytest
from run_folders import RUN
from two_users import ME, OTHER, PROJECT, as_user, shared_space

from hpctrain.base.errors import InputError, UntrustedError
from hpctrain.base.owned_files import owner_only, read_owned
from hpctrain.base.process import SystemRunner
from hpctrain.records.run.run import Run
from hpctrain.report.status import State, read_status
from hpctrain.runs.code_copy import copy_code
from hpctrain.runs.folder import check_trusted, create_run_folder, lock_run_folder
from hpctrain.runs.locate import find_run, record_job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = create_run_folder(tmp_path, Run.model_validate(RUN), None, None, 0.0).path
    (path / "submitit").mkdir()
    (path / "submitit" / "7_submitted.pkl").write_bytes(b"x")
    (path / "code" / "models").mkdir(parents=True)
    (path / "code" / "models" / "own.py").write_text("")
    (path / "code" / "link.py").symlink_to("models/own.py")
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def default_acl(group: int) -> bytes:
    """The extended attribute of `setfacl -d -m g:<group>:rwx` (acl(5); linux/posix_acl_xattr.h)."""
    nobody = 2**32 - 1
    entries = [(1, 7, nobody), (4, 7, nobody), (8, 7, group), (16, 7, nobody), (32, 5, nobody)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def test_a_default_acl_of_the_space_around_does_not_reach_into_a_run_folder(tmp_path: Path) -> None:
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", default_acl(4711))
    except OSError:
        pytest.skip("this file system has no ACLs")
    with owner_only():
        folder = create_run_folder(tmp_path, Run.model_validate(RUN), None, None, 0.0).path
        (folder / "logs" / "0").mkdir()
    assert {path.name: mode(path) for path in folder.rglob("*") if mode(path) & 0o077} == {}
    assert read_owned(folder / "run.yaml")


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000])
def test_a_new_run_folder_is_for_its_owner_whatever_the_umask_is(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = create_run_folder(tmp_path, Run.model_validate(RUN), None, None, 0.0).path
    finally:
        os.umask(before)
    assert mode(path) == 0o700
    assert mode(path / "key") == 0o600
    check_trusted(path)


def test_blocks_of_two_threads_that_overlap_leave_the_umask_as_it_was(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        first, second = owner_only(), owner_only()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)  # the one that began first ends first, as in threads
        (tmp_path / "inside").touch()
        second.__exit__(None, None, None)
        (tmp_path / "after").touch()
    finally:
        os.umask(before)
    assert mode(tmp_path / "inside") == 0o600
    assert mode(tmp_path / "after") == 0o644


@pytest.fixture
def shared_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """This user's group has other members."""
    monkeypatch.setattr("hpctrain.base.owned_files.is_private_group", lambda gid: False)


@pytest.mark.usefixtures("shared_group")
def test_in_a_folder_that_nobody_else_can_enter_the_group_of_what_lies_in_it_does_not_matter(folder: Path) -> None:
    (folder / "submitit").chmod(0o775)
    (folder / "submitit" / "7_submitted.pkl").chmod(0o664)
    check_trusted(folder)
    folder.chmod(0o750)
    with pytest.raises(InputError, match=r"submitit: can be written by group"):
        check_trusted(folder)


def test_a_folder_opened_to_readers_is_used_as_long_as_they_can_change_nothing(folder: Path) -> None:
    folder.chmod(0o755)
    check_trusted(folder)


@pytest.mark.usefixtures("shared_group")
@pytest.mark.parametrize("bits", [0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(folder: Path, bits: int) -> None:
    folder.chmod(bits)
    with pytest.raises(InputError, match=rf"can be written by .* \(mode {bits:o}\).*chmod -R go-rwx"):
        check_trusted(folder)


@pytest.mark.parametrize(
    "name", ["run.yaml", "submitit", "submitit/7_submitted.pkl", "code", "code/models", "code/models/own.py"]
)
def test_in_a_folder_that_others_can_enter_nothing_that_is_run_may_be_theirs_to_write(folder: Path, name: str) -> None:
    folder.chmod(0o755)
    (folder / name).chmod(0o777)
    with pytest.raises(InputError, match=rf"{name}: can be written by others"):
        check_trusted(folder)


def test_a_key_that_others_can_read_is_no_key(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "key").chmod(0o644)
    with pytest.raises(InputError, match=r"key: can be read by others \(mode 644\)"):
        check_trusted(folder)


def test_a_pickle_put_there_as_a_link_is_not_used(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o755)
    (folder / "submitit" / "8_submitted.pkl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"8_submitted\.pkl: is a symbolic link"):
        check_trusted(folder)


@pytest.mark.requires("root")
def test_a_folder_of_another_user_is_not_used(folder: Path) -> None:
    os.chown(folder, 65534, 65534)
    with pytest.raises(InputError, match=r"belongs to another user \(uid 65534\)"):
        check_trusted(folder)


@pytest.mark.parametrize("name", ["job_id", "events.jsonl", "cancelled", "anything"])
def test_a_fifo_or_a_link_in_the_folder_is_not_used(folder: Path, name: str) -> None:
    os.mkfifo(folder / name)
    with pytest.raises(InputError, match=rf"{name}: is a FIFO, expected a regular file"):
        check_trusted(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("run.yaml")
    with pytest.raises(InputError, match=rf"{name}: is a symbolic link, expected a regular file"):
        check_trusted(folder)


def test_checkpoints_may_lie_on_another_disk_of_mine(folder: Path, tmp_path: Path) -> None:
    (folder / "checkpoints").rename(tmp_path / "scratch")
    (folder / "checkpoints").symlink_to(tmp_path / "scratch")
    check_trusted(folder)
    (tmp_path / "scratch").chmod(0o777)
    with pytest.raises(InputError, match=r"checkpoints: can be written by others"):
        check_trusted(folder)


def test_the_copy_of_the_code_is_closed_whatever_the_source_is(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "models").mkdir(parents=True)
    (source / "models" / "own.py").write_text("")
    for path in (source, source / "models", source / "models" / "own.py"):
        path.chmod(0o777)
    folder = create_run_folder(tmp_path, Run.model_validate(RUN), None, None, 0.0).path
    copy_code(source, folder, SystemRunner())
    check_trusted(folder)
    assert mode(folder / "code") == mode(folder / "code" / "models" / "own.py") == 0o700
    folder.chmod(0o755)
    check_trusted(folder)


@pytest.mark.requires("root")
def test_a_run_lives_in_a_project_s_space_and_the_other_members_cannot_use_it() -> None:
    """Two users of one group, in a setgid folder of root's that the group can write to."""
    with shared_space(0o2775, group=PROJECT) as space:

        def live() -> tuple[str, State]:
            folder = create_run_folder(space / "runs", Run.model_validate(RUN), None, None, 0.0)
            record_job(folder.path, "7")
            lock_run_folder(folder.path).close()
            check_trusted(folder.path)
            found = find_run("7", {"HPCTRAIN_RUNS": str(space / "runs")}, space)
            return str(found), read_status(found, 1.0).state

        runs = space / "runs"
        path, state = as_user(ME, live, (PROJECT,))
        assert state == "queued"
        assert {mode(Path(path)), mode(Path(path) / "logs")} == {0o2700}
        assert {mode(Path(path) / name) for name in ("run.yaml", "key", "job_id", "run.lock")} <= {0o600, 0o644}
        runs.chmod(0o2775)
        with pytest.raises(UntrustedError, match=rf"belongs to another user \(uid {ME}\)"):
            as_user(OTHER, lambda: find_run("gpt", {"HPCTRAIN_RUNS": str(runs)}, space), (PROJECT,))
        with pytest.raises(InputError, match=rf"no such run.* 1 × belongs to another user \(uid {ME}\)"):
            as_user(OTHER, lambda: find_run("7", {"HPCTRAIN_RUNS": str(runs)}, space), (PROJECT,))
