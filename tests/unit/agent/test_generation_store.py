"""One generation, one file, one winner."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpctrain.agent.generation_store import GenerationStore
from hpctrain.records.history.generation import Generation, Member, StoreAddress


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


def test_before_the_first_there_is_none(tmp_path: Path) -> None:
    store = GenerationStore(tmp_path / "generations")
    assert store.newest() is None
