"""What cannot fit is told before it is begun, on a real file system of a few megabytes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.base.errors import StorageError
from hpctrain.base.system.disk_space import check_disk_space, free_bytes


def test_the_room_of_a_folder_that_is_not_there_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > 0


def test_what_fits_leaves_nothing_behind(tmp_path: Path) -> None:
    check_disk_space(tmp_path, 1 << 20, "a thing", files=3)
    assert list(tmp_path.iterdir()) == []


def test_more_than_is_free_is_refused_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no room for a thing: .* are free, 1024\.0 TiB are needed"):
        check_disk_space(tmp_path, 1 << 50, "a thing")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write a thing: No such file or directory"):
        check_disk_space(tmp_path / "gone", 1, "a thing")


PROGRAM = """
import os, sys
from pathlib import Path
from hpctrain.base.system import disk_space
from hpctrain.base.errors import StorageError
disk = Path(sys.argv[1])
Path(disk, "half").write_bytes(bytes(4 << 20))
disk_space.check_disk_space(disk, 2 << 20, "small", files=4)
# A quota is not in what the file system says is free: here that says too much.
disk_space.free_bytes = lambda path: 1 << 50
try:
    disk_space.check_disk_space(disk, 6 << 20, "large", files=4)
except StorageError as error:
    print(error)
print(sorted(path.name for path in disk.iterdir()))
"""


@pytest.mark.requires("userns")
def test_room_that_is_only_said_to_be_there_is_found_out_by_taking_it(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    assert unshare is not None
    mount = 'mount -t tmpfs -o size=8m tmpfs "$1" && exec "$0" -c "$2" "$1"'
    argv = [unshare, "-rm", "sh", "-c", mount, sys.executable, str(tmp_path), PROGRAM]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.splitlines() == [
        f"{tmp_path}: no room for large: less is free, 6.0 MiB are needed; free some space",
        "['half']",
    ], done.stderr
