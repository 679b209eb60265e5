"""The witness: one acceptor for all agents, as files that are created once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpctrain.agent.consensus import Ballot, Vote
from hpctrain.agent.generation_store import GenerationStore
from hpctrain.agent.witness import Witness
from hpctrain.base.errors import FileError, HpctrainError, StorageError
from hpctrain.records.history.generation import Generation, Member, StoreAddress
from hpctrain.records.history.witness import witness_file


def record(who: str) -> Generation:
    member = Member(node=who, incarnation=f"{who}-1", addr="127.0.0.1", store_port=1)
    store = StoreAddress(addr="127.0.0.1", port=1, node=who)
    return Generation(number=3, attempt=0, members=[member], plan="plan.json", store=store, reason="it broke")


def witness(folder: Path) -> Witness:
    return Witness(GenerationStore(folder), 3)


def test_it_promises_and_votes_like_any_acceptor_and_tells_who_comes_next(tmp_path: Path) -> None:
    first, second = witness(tmp_path / "generations"), witness(tmp_path / "generations")
    low, high = Ballot(1, "a"), Ballot(2, "b")
    assert first.prepare(low) == (True, first._state)
    assert second.prepare(high)[0]
    granted, state = first.accept(Vote(low, record("a")))
    assert (granted, state.promised, state.vote) == (False, high, None)
    assert second.accept(Vote(high, record("b")))[0]
    granted, state = witness(tmp_path / "generations").prepare(Ballot(3, "c"))
    assert (granted, state.vote) == (True, Vote(high, record("b")))
    # Another generation has a witness of its own.
    assert Witness(GenerationStore(tmp_path / "generations"), 4).prepare(low)[0]


def test_of_many_who_ask_at_once_all_see_the_same_order(tmp_path: Path) -> None:
    ballots = [Ballot(1, f"p{index:02d}") for index in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda ballot: witness(tmp_path).prepare(ballot)[0], ballots))
    last = witness(tmp_path)
    refused, state = last.prepare(Ballot(1, "a"))
    assert (refused, state.promised) == (False, ballots[-1])
    assert answers[-1]
    assert last._length == sum(answers)


def test_a_damaged_entry_is_an_error_and_no_silence(tmp_path: Path) -> None:
    assert witness(tmp_path).prepare(Ballot(1, "a"))[0]
    witness_file(tmp_path, 3, 0).write_text('{"number": 3}')
    with pytest.raises(FileError, match=r"witness-000003-0000\.json"):
        witness(tmp_path).prepare(Ballot(2, "a"))


def test_an_entry_that_exists_and_cannot_be_read_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    witness_file(tmp_path, 3, 0).symlink_to("/nonexistent")
    with pytest.raises(HpctrainError, match=r"witness-000003-0000\.json"):
        witness(tmp_path).prepare(Ballot(1, "a"))


def test_a_name_that_the_client_does_not_see_yet_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS may remember for a while that the file did not exist."""
    assert witness(tmp_path).prepare(Ballot(1, "a"))[0]
    monkeypatch.setattr(GenerationStore, "read", lambda store, path, kind: None)
    with pytest.raises(StorageError, match=r"witness-000003-0000\.json: exists, and cannot be read"):
        witness(tmp_path).prepare(Ballot(2, "b"))


def test_publishing_twice_is_once_and_another_record_is_an_error(tmp_path: Path) -> None:
    store = GenerationStore(tmp_path / "generations")
    for _ in range(2):
        store.publish(record("a"))
    assert store.newest() == record("a")
    with pytest.raises(HpctrainError, match="is not the record that the agents agreed on"):
        store.publish(record("b"))
