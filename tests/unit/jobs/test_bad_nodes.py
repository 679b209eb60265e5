"""Which nodes are blamed, and that leaving them out never keeps a job from starting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import FileError
from hpctrain.jobs.bad_nodes import nodes_to_blame, record_bad_nodes, select_excluded_nodes
from hpctrain.records.history.ledger import BAD_NODES_FILE, BadNode, read_bad_nodes
from hpctrain.records.history.run_log import Event, EventKind

NODES = ("gpu1", "gpu2", "gpu3", "gpu4")


def event(kind: EventKind, writer: str = "gpu1", **data: object) -> Event:
    return Event(time_s=0, attempt=0, generation=0, node=writer, kind=kind, reason="", data=data)


STARTED = event("generation_started", members=list(NODES))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([event("probed", exclude=["gpu4"], status="warn")], {"gpu4"}),
        ([STARTED, event("failed", exit_code=75, left=["gpu1", "gpu2"])], {"gpu3", "gpu4"}),
        # A cut network: both sides speak, so no node of them is gone.
        (
            [
                STARTED,
                event("failed", "gpu1", exit_code=75, left=["gpu1", "gpu2"]),
                event("failed", "gpu3", exit_code=75, left=["gpu3", "gpu4"]),
            ],
            set(),
        ),
        # Before the first generation: those that never came.
        (
            [event("attempt_started", nodes=["gpu1", "gpu2"]), event("failed", exit_code=75, left=["gpu1"])],
            {"gpu2"},
        ),
        ([event("failed", exit_code=1)], set()),
        # One of a cut pair is left out, whether the others go on or are too few.
        ([STARTED, event("node_left_out"), event("failed", exit_code=1)], set()),
        ([STARTED, event("failed", exit_code=75, left=["gpu1", "gpu2", "gpu3"], left_out=["gpu4"])], set()),
        # An agent that ends by an error of its own would do so on any node.
        ([STARTED, event("agent_crashed", "gpu2", node="gpu2"), event("node_lost", node="gpu2")], set()),
        (
            [
                STARTED,
                *(event("agent_crashed", n, node=n) for n in NODES[1:]),
                event("failed", exit_code=75, left=["gpu1"]),
            ],
            set(),
        ),
        ([event("worker_died", "gpu2")] * 3, {"gpu2"}),
        ([event("worker_died", "gpu2")] * 2, set()),
        # Hardware is to blame at once, the program never.
        ([event("failed", exit_code=76, node="gpu2", fault="gpu_memory_error")], {"gpu2"}),
        ([event("worker_died", "gpu3", node="gpu3", exit_code=1, fault="open_files")], {"gpu3"}),
        ([event("failed", exit_code=1, node="gpu2", fault="illegal_access")], set()),
        ([event("failed", exit_code=76, node="gpu2", fault="nccl_system_error")], set()),
        # A program that fails everywhere is no node's fault.
        ([event("worker_died", node) for node in NODES * 3], set()),
    ],
)
def test_nodes_are_blamed_for_what_happened_on_them(events: list[Event], expected: set[str]) -> None:
    assert set(nodes_to_blame(events)) == expected


def lost(name: str) -> Event:
    return Event(time_s=0, attempt=0, generation=0, node="gpu1", kind="node_lost", reason="", data={"node": name})


def test_a_node_that_came_back_is_forgiven() -> None:
    back = Event(time_s=0, attempt=0, generation=1, node="gpu1", kind="node_returned", reason="", data={"node": "gpu2"})
    assert set(nodes_to_blame([lost("gpu2"), lost("gpu3"), back])) == {"gpu3"}
    assert set(nodes_to_blame([lost("gpu2"), back, lost("gpu2")])) == {"gpu2"}


def test_the_ledger_has_each_node_once_an_attempt_and_no_name_that_is_none(tmp_path: Path) -> None:
    events = [lost("gpu2"), lost("None assigned"), lost("-x"), lost("gpu[1-9]"), lost("gpu7;reboot\n")]
    record_bad_nodes(tmp_path, 3, events, now=100.0, hours=2)
    record_bad_nodes(tmp_path, 3, events, now=200.0, hours=2)
    record_bad_nodes(tmp_path, 4, events, now=200.0, hours=0)
    (line,) = read_bad_nodes(tmp_path)
    assert (line.node, line.attempt, line.time_s, line.expires_s) == ("gpu2", 3, 100.0, 7300.0)


def test_a_name_that_somebody_wrote_by_hand_is_checked(tmp_path: Path) -> None:
    line = {"node": "gpu1,gpu2", "attempt": 0, "time_s": 0, "expires_s": 1, "reason": "slow"}
    (tmp_path / BAD_NODES_FILE).write_text(json.dumps(line) + "\n")
    with pytest.raises(FileError, match="node"):
        read_bad_nodes(tmp_path)


def bad(node: str, time_s: float = 0.0, expires_s: float = 100.0) -> BadNode:
    return BadNode(node=node, attempt=0, time_s=time_s, expires_s=expires_s, reason="it was lost")


def test_the_worst_go_first_and_the_expired_come_back() -> None:
    lines = [bad("gpu1", 1), bad("gpu2", 2), bad("gpu2", 3), bad("gpu3", 4, expires_s=5)]
    assert select_excluded_nodes(lines, 10, NODES, NODES, 1, 0.25) == ["gpu2"]
    assert select_excluded_nodes(lines, 10, NODES, NODES, 1, 1.0) == ["gpu1", "gpu2"]
    assert select_excluded_nodes(lines, 10, NODES, NODES, 3, 1.0) == ["gpu2"]
    assert select_excluded_nodes(lines, 10, NODES, NODES, 4, 1.0) == []
    # A node that is down costs nothing: the job would not get it anyway.
    assert select_excluded_nodes(lines, 10, NODES, ("gpu1", "gpu3", "gpu4"), 3, 1.0) == ["gpu2"]


names = st.sampled_from([f"n{index}" for index in range(12)])


@given(
    lines=st.lists(st.builds(bad, names, st.floats(0, 50), st.floats(0, 100))),
    now=st.floats(0, 100),
    allowed=st.sets(names),
    up=st.sets(names),
    needed=st.integers(1, 6),
    fraction=st.floats(0, 1),
)
def test_no_choice_keeps_the_job_from_starting(
    lines: list[BadNode], now: float, allowed: set[str], up: set[str], needed: int, fraction: float
) -> None:
    usable = allowed & up
    chosen = select_excluded_nodes(lines, now, allowed, usable, needed, fraction)
    assert len(chosen) <= fraction * len(allowed)
    assert len(usable - set(chosen)) >= min(needed, len(usable))
    assert set(chosen) <= allowed & {line.node for line in lines if line.expires_s > now}
    assert chosen == sorted(set(chosen))
