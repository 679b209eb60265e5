"""A run folder is its owner's alone, and is not used when it stopped being so."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from run_folders import RUN

from hpctrain.base.errors import InputError
from hpctrain.launch.folder import create_run_folder
from hpctrain.launch.trust import check_trusted
from hpctrain.records.run import Run


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


def test_what_lies_in_a_folder_that_nobody_else_can_enter_may_have_any_mode(folder: Path) -> None:
    (folder / "submitit").chmod(0o775)
    (folder / "submitit" / "7_submitted.pkl").chmod(0o666)
    check_trusted(folder)


def test_a_folder_opened_to_readers_is_used_as_long_as_they_can_change_nothing(folder: Path) -> None:
    folder.chmod(0o755)
    check_trusted(folder)


@pytest.mark.parametrize("bits", [0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(folder: Path, bits: int) -> None:
    folder.chmod(bits)
    with pytest.raises(InputError, match=rf"can be written by others \(mode {bits:o}\).*chmod -R go-rwx"):
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
