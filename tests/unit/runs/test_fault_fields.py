"""Which nodes are measured again, and when an error of the program is a node's after all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.records.history.fault import FAULTS, fault_named
from hpctrain.records.history.ledger import failures_since_checkpoint
from hpctrain.records.history.run_log import Event, EventKind
from hpctrain.runs.fault_fields import attempt_fault_fields, confirmed_suspects, faults_by_node, suspect_node


def event(kind: EventKind, by: str = "gpu1", **data: object) -> Event:
    return Event(time_s=0, attempt=0, generation=0, node=by, kind=kind, reason="", data=data)


def failed(node: str, fault: str, code: int = 1) -> list[Event]:
    """As an agent writes it: the worker's death, then the end of the attempt."""
    return [
        event("worker_died", node, node=node, exit_code=1, fault=fault),
        event("failed", node, node=node, exit_code=code, fault=fault),
    ]


ILLEGAL = {"gpu2": "illegal_access"}


@pytest.mark.parametrize(
    ("history", "suspect"),
    [
        ([], None),
        ([ILLEGAL], None),
        ([ILLEGAL, ILLEGAL], "gpu2"),
        # What happened in between says nothing, as long as no other node showed it.
        ([ILLEGAL, {}, {"gpu1": "gpu_out_of_memory"}, ILLEGAL], "gpu2"),
        ([ILLEGAL, {"gpu1": "illegal_access"}, ILLEGAL], None),
        ([{"gpu1": "illegal_access"}, ILLEGAL], None),
        ([ILLEGAL, {"gpu1": "illegal_access", "gpu2": "illegal_access"}], None),
        ([{"gpu1": "illegal_access", "gpu2": "illegal_access"}, ILLEGAL], None),
        # Another error is another story.
        ([{"gpu2": "device_assert"}, ILLEGAL], None),
        # The last attempt is the one that counts.
        ([ILLEGAL, ILLEGAL, {}], None),
        # Hardware needs no suspicion: it is blamed at once.
        ([{"gpu2": "gpu_lost"}, {"gpu2": "gpu_lost"}], None),
    ],
)
def test_one_node_alone_twice(history: list[dict[str, str]], suspect: str | None) -> None:
    assert suspect_node(history) == suspect


@given(
    st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from([row.name for row in FAULTS]))),
)
def test_whoever_is_suspected_showed_it_twice_and_nobody_else_did(history: list[dict[str, str]]) -> None:
    node = suspect_node(history)
    if node is None:
        return
    name = history[-1][node]
    showed = [{place for place, other in shown.items() if other == name} for shown in history]
    assert sum(node in places for places in showed) >= 2
    assert set().union(*showed) == {node}
    assert fault_named(name).blame == "user"


def test_the_nodes_of_an_attempts_faults() -> None:
    events = [*failed("gpu1", "exception"), *failed("gpu2", "gpu_memory_error", 76), event("worker_died", "gpu3")]
    assert {node: fault.name for node, fault in faults_by_node(events).items()} == {
        "gpu1": "exception",
        "gpu2": "gpu_memory_error",
    }
    # Hardware goes before what the program said of it.
    both = [*failed("gpu1", "exception"), *failed("gpu1", "gpu_lost", 76)]
    assert faults_by_node(both)["gpu1"].name == "gpu_lost"
    assert faults_by_node([event("failed", fault=["gpu_lost"], node="gpu1")]) == {}


@pytest.mark.parametrize(
    ("events", "again"),
    [
        (failed("gpu2", "gpu_memory_error", 76), "gpu2 had this: uncorrectable memory error of a GPU"),
        (failed("gpu2", "open_files", 76), "gpu2 had this: too many open files"),
        ([event("failed", exit_code=77)], "nodes or the network failed"),
        ([event("failed", exit_code=75, left=["gpu1"])], "nodes were lost"),
        # The program's errors, an end on request and a refused plan say nothing against the nodes.
        (failed("gpu2", "illegal_access"), None),
        (failed("gpu2", "exception"), None),
        ([event("preempted")], None),
        ([event("failed", exit_code=4)], None),
        ([], None),
    ],
)
def test_after_which_ends_the_nodes_are_measured_again(events: list[Event], again: str | None) -> None:
    assert attempt_fault_fields(events, []).get("retest") == again


def line(kind: str, events: list[Event], before: list[dict[str, Any]]) -> dict[str, Any]:
    return {"class": kind, **attempt_fault_fields(events, before)}


def test_a_suspect_that_the_probe_finds_bad_takes_the_failures_upon_itself() -> None:
    lines: list[dict[str, Any]] = []
    lines.append(line("fatal", failed("gpu2", "illegal_access"), lines))
    assert "suspect" not in lines[-1]
    lines.append(line("fatal", failed("gpu2", "illegal_access"), lines))
    assert lines[-1]["suspect"] == "gpu2"
    assert lines[-1]["retest"] == "gpu2 alone showed this in two attempts: illegal memory access on a GPU"
    assert failures_since_checkpoint(lines) == 2
    # The attempt that measured again goes on without it, and fails for a reason of its own.
    probed = [event("probed", exclude=["gpu2"], status="warn")]
    assert confirmed_suspects(probed, lines) == ["gpu2"]
    assert failures_since_checkpoint(lines, confirmed_suspects(probed, lines)) == 0
    lines.append(line("fatal", [*probed, *failed("gpu1", "exception")], lines))
    assert lines[-1]["confirmed"] == ["gpu2"]
    assert failures_since_checkpoint(lines) == 1


def raised(kind: str, where: str | None) -> list[Event]:
    error = {"kind": kind, "message": "why", "where": where}
    return [event("worker_died", node="gpu2", exit_code=1, fault="exception", error=error)]


@pytest.mark.parametrize(
    ("errors", "suspect"),
    [
        ([("KeyError", "gpt.py:3 in loss"), ("KeyError", "gpt.py:3 in loss")], "gpu2"),
        ([("KeyError", None), ("KeyError", None)], "gpu2"),
        ([("KeyError", "gpt.py:3 in loss"), ("KeyError", "gpt.py:9 in forward")], None),
        ([("KeyError", "gpt.py:3 in loss"), ("ValueError", "gpt.py:3 in loss")], None),
    ],
)
def test_exceptions_are_the_same_by_class_and_place(errors: list[tuple[str, str | None]], suspect: str | None) -> None:
    lines: list[dict[str, Any]] = []
    for kind, where in errors:
        lines.append(line("fatal", raised(kind, where), lines))
        assert lines[-1]["faults"] == {"gpu2": "exception"}
        assert lines[-1]["exceptions"] == {"gpu2": f"{kind} at {where}" if where else kind}
    assert lines[-1].get("suspect") == suspect
    hardware = [*raised("KeyError", None), *failed("gpu2", "gpu_lost", 76)]
    assert "exceptions" not in attempt_fault_fields(hardware, []), "a fault of the GPU explains it"


def test_a_suspect_that_the_probe_finds_sound_is_none_any_more() -> None:
    lines: list[dict[str, Any]] = []
    for _ in range(2):
        lines.append(line("fatal", failed("gpu2", "device_assert"), lines))
    probed = [event("probed", exclude=["gpu3"], status="warn")]
    lines.append(line("fatal", [*probed, *failed("gpu2", "device_assert")], lines))
    # gpu3 was never under suspicion: the probe's word on it is no word on these failures.
    assert "confirmed" not in lines[-1]
    assert "suspect" not in lines[-1]
    assert failures_since_checkpoint(lines) == 3
    lines.append(line("fatal", failed("gpu2", "device_assert"), lines))
    assert lines[-1]["suspect"] == "gpu2"
