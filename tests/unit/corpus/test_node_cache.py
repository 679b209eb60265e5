"""A copy on the node's own disk is whole and checked, made once, and gives way where nobody uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_clock import FakeClock

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import HpctrainError, StorageError
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.read import node_cache
from hpctrain.corpus.read.node_cache import VARIABLE, cache_on_node, cached_folders, is_whole, size_bytes
from hpctrain.corpus.read.tokens import Corpus, read_index

CLOCK = SystemClock()


def never() -> None:
    """Whoever copies is never asked to give up."""


def corpus(base: Path, name: str, text: str) -> Path:
    (base / f"{name}.txt").write_text(text * 400)
    prepare([base / f"{name}.txt"], base / name, PrepareOptions(valid_fraction=0.1, shard_tokens=1500))
    return base / name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return corpus(tmp_path, "data", "some text\n")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A node's disk."""
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


def own(base: Path) -> Path:
    return base / f"hpctrain-{os.getuid()}"


def files(base: Path) -> list[str]:
    """What lies on the node's disk, besides locks."""
    return sorted(path.name for path in own(base).iterdir() if not path.name.endswith(".lock"))


def test_the_copy_reads_as_the_folder_does_and_is_its_owners_alone(folder: Path, base: Path) -> None:
    copy = cache_on_node(folder, base, CLOCK, never)
    assert copy.copied_bytes == size_bytes(read_index(folder))
    one, other = (Corpus.open([where], "train", 64) for where in (folder, copy.path))
    assert (one.rows(0, 0, 50) == other.rows(0, 0, 50)).all()
    assert {path.stat().st_mode & 0o777 for path in (own(base), copy.path)} == {0o700}
    os.close(copy.descriptor)


def test_a_second_run_finds_the_copy_there(folder: Path, base: Path) -> None:
    first, second = (cache_on_node(folder, base, CLOCK, never) for _ in range(2))
    assert (second.path, second.copied_bytes) == (first.path, 0)
    os.close(first.descriptor)
    os.close(second.descriptor)


def test_virtual_nodes_that_share_a_disk_copy_once(folder: Path, base: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(lambda _: cache_on_node(folder, base, CLOCK, never), range(4)))
    assert sorted(copy.copied_bytes > 0 for copy in copies) == [False, False, False, True]
    for copy in copies:
        os.close(copy.descriptor)


def test_other_data_of_the_same_name_is_another_copy(folder: Path, base: Path, tmp_path: Path) -> None:
    first = cache_on_node(folder, base, CLOCK, never)
    shutil.rmtree(folder)
    second = cache_on_node(corpus(tmp_path, "data", "other text\n"), base, CLOCK, never)
    assert first.path != second.path
    assert len(files(base)) == 2


def test_what_a_killed_copier_left_is_removed(folder: Path, base: Path) -> None:
    copy = cache_on_node(folder, base, CLOCK, never)
    os.close(copy.descriptor)
    left = own(base) / f".{copy.path.name}.0000.tmp"
    copy.path.rename(left)
    again = cache_on_node(folder, base, CLOCK, never)
    assert again.copied_bytes > 0
    assert files(base) == [copy.path.name]
    os.close(again.descriptor)


def test_a_copy_that_lost_a_shard_to_a_cleaner_is_made_again(folder: Path, base: Path) -> None:
    copy = cache_on_node(folder, base, CLOCK, never)
    next(copy.path.glob("train-*")).unlink()
    environ = {VARIABLE: json.dumps({str(folder): str(copy.path)})}
    assert cached_folders([str(folder)], environ) == [str(folder)]
    os.close(copy.descriptor)
    again = cache_on_node(folder, base, CLOCK, never)
    assert again.copied_bytes > 0
    assert cached_folders([str(folder), "/other"], environ) == [str(copy.path), "/other"]
    os.close(again.descriptor)


def test_a_damaged_copy_that_others_use_is_left_to_them(folder: Path, base: Path) -> None:
    copy = cache_on_node(folder, base, CLOCK, never)
    next(copy.path.glob("train-*")).unlink()
    with pytest.raises(StorageError, match="is not whole any more, and another run uses it"):
        cache_on_node(folder, base, FakeClock(), never)
    os.close(copy.descriptor)


def test_a_shard_that_is_not_what_the_index_says_is_told_and_leaves_nothing(folder: Path, base: Path) -> None:
    shard = next(folder.glob("train-*"))
    data = bytearray(shard.read_bytes())
    data[7] ^= 1
    shard.write_bytes(data)
    with pytest.raises(HpctrainError, match=rf"{shard.name}: is not what its index says"):
        cache_on_node(folder, base, CLOCK, never)
    assert files(base) == []


def test_copying_ends_when_it_is_told_to_and_leaves_nothing(folder: Path, base: Path) -> None:
    asked = iter([None, None, "asked to stop"])
    with pytest.raises(HpctrainError, match="asked to stop"):
        cache_on_node(folder, base, CLOCK, lambda: next(asked))
    assert files(base) == []


@pytest.mark.parametrize("trap", ["link", "open", "file"])
def test_a_folder_that_may_be_somebody_elses_is_not_used(folder: Path, base: Path, tmp_path: Path, trap: str) -> None:
    if trap == "link":
        own(base).symlink_to(tmp_path)
    elif trap == "open":
        own(base).mkdir()
        own(base).chmod(0o777)
    else:
        own(base).write_text("")
        own(base).chmod(0o600)
    with pytest.raises(StorageError, match=r"name another folder with data\.stage_folder"):
        cache_on_node(folder, base, CLOCK, never)


def test_a_lock_put_there_as_a_link_is_not_followed(folder: Path, base: Path, tmp_path: Path) -> None:
    copy = cache_on_node(folder, base, CLOCK, never)
    lock = own(base) / f".{copy.path.name}.lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="cannot write: Too many levels of symbolic links"):
        cache_on_node(folder, base, CLOCK, never)
    assert not (tmp_path / "elsewhere").exists()


def test_copies_that_nobody_uses_make_room_and_those_in_use_stay(
    folder: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = cache_on_node(folder, base, CLOCK, never)
    unused = cache_on_node(corpus(tmp_path, "old", "old text\n"), base, CLOCK, never)
    os.close(unused.descriptor)
    new = corpus(tmp_path, "new", "new text\n")
    monkeypatch.setattr(node_cache, "free_bytes", lambda path: 0 if unused.path.exists() else 1 << 40)
    copy = cache_on_node(new, base, CLOCK, never)
    assert files(base) == sorted([used.path.name, copy.path.name])
    assert is_whole(used.path, read_index(folder))


PROGRAM = """
import sys
from pathlib import Path
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import StorageError
from hpctrain.corpus.read.node_cache import cache_on_node
try:
    cache_on_node(Path(sys.argv[2]), Path(sys.argv[1]), SystemClock(), lambda: None)
except StorageError as error:
    print(error)
print(sorted(path.suffix for path in next(Path(sys.argv[1]).glob("hpctrain-*")).iterdir()))
"""


@pytest.mark.requires("userns")
def test_a_disk_that_is_too_small_is_told_and_nothing_is_begun(folder: Path, base: Path) -> None:
    unshare = shutil.which("unshare")
    assert unshare is not None
    mount = 'mount -t tmpfs -o size=4k tmpfs "$1" && exec "$0" -c "$3" "$1" "$2"'
    argv = [unshare, "-rm", "sh", "-c", mount, sys.executable, str(base), str(folder), PROGRAM]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    said, left = done.stdout.splitlines()
    assert "no room for a copy of the data: " in said
    assert left == "['.lock']"
