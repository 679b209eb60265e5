"""Who holds a generation up, in one sentence; and the way of that knowledge through heartbeats."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.agent.hang_report import WorkerActivity, blocking_workers, describe_hang
from hpctrain.agent.peer_messages import Announcement
from hpctrain.agent.tree.reading import read_message
from hpctrain.base.net.wire import MalformedMessage

DOING = st.builds(
    WorkerActivity, st.integers(0, 2000), st.text(max_size=20), st.integers(0, 10**6), st.text(max_size=40),
    st.booleans(), st.sampled_from(["", "stopped by a signal"]),
)  # fmt: skip


def waiting(rank: int, operation: str = "all-gather of metrics", step: int = 7) -> WorkerActivity:
    return WorkerActivity(rank, f"n{rank}:cpu0", step, operation, True)


BUSY = WorkerActivity(1, "n1:cpu0", 7, "backward stage 1 micro-batch 0", False)
STOPPED = WorkerActivity(
    2, "n2:cpu0", 7, "recv output of stage 0 micro-batch 1 from rank 0", True, "stopped by a signal"
)


def test_the_one_that_waits_for_nobody_is_to_blame() -> None:
    said = describe_hang([waiting(0), BUSY, waiting(3), waiting(2)])
    assert said == (
        "rank 1 (n1:cpu0) hangs in step 7: backward stage 1 micro-batch 0; "
        "ranks 0, 2, 3 wait in step 7: all-gather of metrics"
    )


def test_a_stopped_process_is_to_blame_whatever_it_was_at() -> None:
    assert blocking_workers([waiting(0), BUSY, STOPPED]) == (STOPPED,)
    said = describe_hang([waiting(0), STOPPED])
    assert said.startswith("rank 2 (n2:cpu0) is stopped by a signal in step 7: recv output of stage 0")


def test_where_all_wait_nobody_is_accused() -> None:
    said = describe_hang([waiting(0, "recv output of stage 0 micro-batch 1 from rank 1"), waiting(1, step=6)])
    assert said == (
        "every rank waits for another, as when a message was lost or the network is cut; "
        "rank 0 waits in step 7: recv output of stage 0 micro-batch 1 from rank 1; "
        "rank 1 waits in step 6: all-gather of metrics"
    )


@given(st.lists(DOING, min_size=1, max_size=300))
def test_a_large_job_is_told_in_few_words(doing: list[WorkerActivity]) -> None:
    said = describe_hang(doing)
    assert said.count("; ") <= 9 + sum(item.operation.count("; ") + item.place.count("; ") for item in doing)


def heartbeat(doing: object) -> dict[str, object]:
    mine = Announcement(
        node="n0", incarnation="n0-a", addr="127.0.0.1", store_port=1, generation=0, phase="running", reason=""
    )
    message: dict[str, object] = json.loads(json.dumps({**mine.to_json(), "doing": doing}))
    return message


@given(st.lists(DOING, max_size=8))
def test_it_goes_through_a_heartbeat(doing: list[WorkerActivity]) -> None:
    heard = read_message(heartbeat(doing))
    assert isinstance(heard, Announcement)
    assert heard.doing == tuple(doing)


@pytest.mark.parametrize(
    "value", [None, "x", [1], [[1, "n", 2, "op"]], [[1, "n", 2, "op", 1, ""]], [[True, "n", 2, "op", True, ""]]]
)
def test_anything_else_is_no_such_message(value: object) -> None:
    with pytest.raises(MalformedMessage, match="doing"):
        read_message(heartbeat(value))
