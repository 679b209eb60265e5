"""The messages between agent and worker: all of them survive their way, and nothing else is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hostile_files import mutated
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.agent.group import WorkerUpdate, event_of
from hpctrain.agent.worker_messages import (
    TEXT_CHARS,
    CheckpointSaved,
    Compiling,
    ErrorDetails,
    NoDiskSpace,
    Order,
    Report,
    ResidualsDropped,
    StartOrder,
    StepDone,
    StopOrder,
    StoreConnection,
    Waiting,
    WeightsHash,
    WorkerError,
    WorkerReady,
    read_order,
    read_report,
)
from hpctrain.base.net.wire import MalformedMessage

STORE = StoreConnection(addr="127.0.0.1", port=4000, secret="s3cret", fd=7)
ORDERS: list[Order] = [
    StartOrder(plan="plan.json", rank=0, generation=3, store=STORE, restore="checkpoints/step-00000002"),
    StartOrder(plan="plan-4.json", rank=5, generation=4, store=STORE.model_copy(update={"fd": None})),
    StopOrder(),
]
DETAILS = ErrorDetails(kind="ValueError", message="no", where="/code/model.py:3 in forward", step=3, operation="step 3")
REPORTS: list[Report] = [
    WorkerReady(step=0),
    Compiling(),
    StepDone(step=1, loss=2.5),
    CheckpointSaved(step=2, seconds=0.5, size_bytes=1 << 40),
    CheckpointSaved(step=2, seconds=0.5, size_bytes=0, error="no space"),
    NoDiskSpace(step=2, reason="no space"),
    Waiting(),
    ResidualsDropped(reason="another layout"),
    WeightsHash(sha256="0a" * 32),
    WorkerError(kind="error", sentence="rank 0: ValueError: no", fault="exception", details=DETAILS),
    WorkerError(kind="lost", sentence="rank 0: closed", fault="lost_peer", details=DETAILS),
]


def wire(model: Order | Report) -> Any:
    return json.loads(json.dumps(model.to_json(), allow_nan=False))


def test_every_message_survives_its_way() -> None:
    assert [read_order(wire(order)) for order in ORDERS] == ORDERS
    assert [read_report(wire(report)) for report in REPORTS] == REPORTS


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"kind": "save"}, "malformed message 'save'"),
        ({"type": "stop"}, "malformed message 'None'"),
        ({"kind": "stop", "now": True}, "in 'stop.now'"),
        (wire(ORDERS[0]) | {"rank": -1}, "in 'start.rank'"),
        (wire(ORDERS[0]) | {"store": wire(ORDERS[0])["store"] | {"port": 1 << 16}}, "in 'start.store.port'"),
        (wire(ORDERS[0]) | {"plan": "x" * (TEXT_CHARS + 1)}, "in 'start.plan'"),
    ],
)
def test_another_order_is_refused_with_its_place(message: dict[str, Any], said: str) -> None:
    with pytest.raises(MalformedMessage, match=said):
        read_order(message)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"kind": "start"}, "malformed message 'start'"),
        ({"kind": ["step"]}, "malformed message"),
        ({"kind": "step", "step": 1}, "in 'step.loss'"),
        ({"kind": "step", "step": 1, "loss": float("nan")}, "in 'step.loss'"),
        ({"kind": "weights", "sha256": "x"}, "in 'weights.sha256'"),
        ({"kind": "error", "sentence": "no", "fault": "exception", "details": None}, "in 'error.details'"),
    ],
)
def test_another_report_is_refused_with_its_place(message: dict[str, Any], said: str) -> None:
    with pytest.raises(MalformedMessage, match=said):
        read_report(message)


def test_a_long_or_undecodable_text_of_an_error_is_sent_all_the_same() -> None:
    report = ResidualsDropped(reason="\udcff" + "x" * TEXT_CHARS)
    assert len(report.reason) == TEXT_CHARS
    assert report.reason.startswith("\\udcffxx")
    assert read_report(wire(report)) == report


def test_the_secret_of_the_store_is_not_shown() -> None:
    assert "s3cret" not in repr(ORDERS[0])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(st.data())
def test_whatever_arrives_is_a_message_or_refused(data: st.DataObject) -> None:
    sent = data.draw(st.sampled_from([wire(model) for model in (*ORDERS, *REPORTS)]))
    message = data.draw(mutated(sent) | st.dictionaries(st.sampled_from(sorted(sent)), JSON) | JSON)
    if not isinstance(message, dict):
        return  # the channel passes on objects only
    for read in (read_order, read_report):
        try:
            model = read(message)
        except MalformedMessage:
            continue
        assert read(wire(model)) == model
        if not isinstance(model, StartOrder | StopOrder):
            event_of("n1", WorkerUpdate(0, model))
