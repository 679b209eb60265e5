"""A recorded step as a trace in Chrome's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.records.history.step_spans import RankSpans, StepSpans, recorded_steps, spans_file
from hpctrain.report.step_trace import PREDICTED_PID, PredictedSpan, step_trace

RECORD = StepSpans(
    step=20, generation=2,
    ranks=[
        RankSpans(rank=0, device="n0:cuda0", spans=[
            ("forward stage 0 mb 0", -1.0, -0.7, "compute"),
            ("send output of stage 0 mb 0 to rank 1", -0.7, -0.69, "pp"),
            ("messages under way", -0.6, -0.5, "hidden"), ("messages under way", -0.55, -0.4, "hidden"),
            ("messages under way", -0.3, -0.2, "hidden"),
            ("send output of stage 0 mb 0 to rank 1", -0.1, 0.0, "pp"),
            ("step 20", -1.0, 0.1, "compute"),
        ]),
        RankSpans(rank=1, device="n1:cuda0", spans=[
            ("recv output of stage 0 mb 0 from rank 0", -0.9, -0.6, "pp"),
            ("recv output of stage 0 mb 1 from rank 0", -0.5, -0.4, "pp"),
            ("step 20", -1.1, 0.1, "compute"),
        ]),
    ],
)  # fmt: skip


def of(trace: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if all(event.get(key) == value for key, value in wanted.items())]


def test_each_rank_is_a_process_and_each_kind_of_work_a_thread() -> None:
    trace = step_trace(RECORD)
    names = {event["pid"]: event["args"]["name"] for event in of(trace, name="process_name")}
    assert names == {0: "rank 0 (n0:cuda0)", 1: "rank 1 (n1:cuda0)"}
    threads = {(event["pid"], event["tid"]) for event in of(trace, name="thread_name")}
    assert threads == {(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)}
    (forward,) = of(trace, name="forward stage 0 mb 0")
    assert (forward["ts"], forward["dur"], forward["tid"], forward["cat"]) == (100_000, 300_000, 1, "compute")
    assert min(event["ts"] for event in of(trace, ph="X")) == 0
    assert trace["otherData"] == {"step": 20, "generation": 2, "ranks": 2}


def test_messages_that_overlap_are_one_slice() -> None:
    slices = [(event["ts"], event["dur"]) for event in of(step_trace(RECORD), cat="hidden")]
    assert slices == [(500_000, 200_000), (800_000, 100_000)]


def test_an_arrow_leads_from_a_send_to_its_receive() -> None:
    trace = step_trace(RECORD)
    (start,), (end,) = of(trace, ph="s"), of(trace, ph="f")
    assert (start["pid"], start["ts"], end["pid"], end["ts"]) == (0, 400_000, 1, 400_000)
    assert start["id"] == end["id"]
    assert end["bp"] == "e"


def test_the_prediction_stands_beside_the_rank() -> None:
    predicted = [PredictedSpan(1, "forward stage 1 mb 0", 0.25, 0.5, "compute"), PredictedSpan(1, "x", 0.5, 1, "dp")]
    trace = step_trace(RECORD, predicted)
    pid = PREDICTED_PID + 1
    (forward,) = of(trace, name="forward stage 1 mb 0")
    assert (forward["pid"], forward["ts"], forward["dur"]) == (pid, 250_000, 250_000)
    order = {event["pid"]: event["args"]["sort_index"] for event in of(trace, name="process_sort_index")}
    assert sorted(order, key=lambda number: order[number]) == [0, 1, pid]


def test_which_steps_were_recorded(tmp_path: Path) -> None:
    assert recorded_steps(tmp_path) == []
    (tmp_path / "profile").mkdir()
    for step in (100, 9):
        RECORD.write(spans_file(tmp_path, step))
    (tmp_path / "profile" / "step-x.spans.json").touch()
    (tmp_path / "profile" / "step-7.rank-0.json.gz").touch()
    assert recorded_steps(tmp_path) == [9, 100]


@pytest.mark.parametrize("span", [("x", 0.0, 1.0), ("x", 0.0, 1e9, "compute"), ("x", 0.0, 1.0, "other"), (1, 0, 1, "")])
def test_garbage_is_refused(span: object) -> None:
    with pytest.raises(ValueError, match="spans"):
        RankSpans.model_validate({"rank": 0, "device": "n0:cpu0", "spans": [span]})
