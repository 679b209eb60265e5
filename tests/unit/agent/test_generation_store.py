"""One generation, one file, one winner."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpctrain.agent.generation_store import GenerationStore
from hpctrain.base import owned_files
from hpctrain.base.errors import StorageError
from hpctrain.records.history.generation import Generation, Member, StoreAddress
from hpctrain.records.history.witness import WitnessEntry


def proposal(number: int, who: str) -> Generation:
    member = Member(node=who, incarnation=f"{who}-1", addr="127.0.0.1", store_port=1)
    return Generation(
        number=number, attempt=0, members=[member], plan="plan.json",
        store=StoreAddress(addr="127.0.0.1", port=1, node=who), reason=f"proposed by {who}",
    )  # fmt: skip


def test_all_proposers_get_the_same_record(tmp_path: Path) -> None:
    names = [f"n{index}" for index in range(16)]
    for number in range(10):
        with ThreadPoolExecutor(16) as pool:
            decided = list(pool.map(lambda who, n=number: GenerationStore(tmp_path).decide(proposal(n, who)), names))
        assert len({record.reason for record in decided}) == 1
        assert GenerationStore(tmp_path).newest() == decided[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"gen-{number:06d}.json" for number in range(10)]


def test_a_file_is_on_disk_with_its_name_before_the_agent_counts_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An acceptor must not forget: after a crash of the machine, the entry of the witness must be there."""
    calls, link, fsync = [], os.link, os.fsync

    def noting_fsync(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "link", lambda *paths: (calls.append("link"), link(*paths)))
    monkeypatch.setattr(os, "fsync", noting_fsync)
    assert GenerationStore(tmp_path).append(0, 0, WitnessEntry(number=0, round=1, proposer="a"))
    assert calls == ["file", "link", "folder"]


def test_before_the_first_there_is_none(tmp_path: Path) -> None:
    store = GenerationStore(tmp_path / "generations")
    assert store.newest() is None


def test_a_file_system_that_fails_is_a_storage_error_which_agents_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = GenerationStore(tmp_path / "generations")
    store.publish(proposal(0, "a"))

    def stale(*arguments: object, **options: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(owned_files, "open_regular", stale)
    for call in (store.newest, lambda: store.publish(proposal(0, "a")), lambda: store.entry(0, 0)):
        with pytest.raises(StorageError, match="cannot read: Stale file handle"):
            call()
    monkeypatch.setattr(Path, "glob", stale)
    with pytest.raises(StorageError, match="cannot read: Stale file handle"):
        store.newest()
