"""A step of a real run on two replicas of two stages, as a trace."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from train_site import Outcome, Site

pytestmark = pytest.mark.slow

NUMBERS = {"ts", "dur", "pid", "tid"}


@pytest.fixture(scope="module")
def run(site: Site) -> Outcome:
    done = site.train(
        "run.yaml", "--local", "4", "--topology", "four.json", "--plan", "plan4.json", "--set", "steps=12",
        "--set", "profile.spans=[5, 10, 99]",
    )  # fmt: skip
    assert done.code == 0, done.said
    return done


def names_by_process(events: list[dict[str, Any]]) -> dict[int, set[str]]:
    names = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            names[event["pid"]].add(event["name"])
    return names


def check_schema(events: list[dict[str, Any]]) -> None:
    """What the Trace Event Format asks of each event, and that the slices of a thread lie within each other or
    apart."""
    rows = defaultdict(list)
    for event in events:
        assert event["ph"] in ("X", "M", "s", "f")
        assert isinstance(event["name"], str)
        assert {"pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert event.keys() >= NUMBERS
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in NUMBERS & event.keys())
    for slices in rows.values():
        open_ends: list[int] = []
        for start, end, name in sorted(slices, key=lambda item: (item[0], -item[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], name
            open_ends.append(end)


def test_every_rank_is_in_the_trace_with_its_messages(site: Site, run: Outcome) -> None:
    assert run.folder is not None
    done = site.command("trace", str(run.folder), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["step"], answer["ranks"], answer["predicted"]) == (10, 4, False)
    assert "no predicted step: plan: replicas: their micro-batches differ in size" in done.stderr
    events = json.loads(Path(answer["trace"]).read_text())["traceEvents"]
    check_schema(events)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    devices = ["local2", "local3", "local0", "local1"]
    assert names == {f"rank {rank} ({device}:cpu0)" for rank, device in enumerate(devices)}
    slices = names_by_process(events)
    for rank, stage, count in ((1, 0, 3), (2, 1, 3), (3, 0, 2), (0, 1, 2)):
        passes = {f"{kind} stage {stage} mb {mb}" for kind in ("forward", "backward") for mb in range(count)}
        assert passes | {"step 10", "optimizer", "all-gather of metrics"} <= slices[rank]
    flows = {event["ph"]: [] for event in events if event["ph"] in "sf"}
    for event in events:
        if event["ph"] in "sf":
            flows[event["ph"]].append((event["id"], event["pid"]))
    assert len(flows["s"]) == len(flows["f"]) == 2 * (3 + 2)  # an output and a gradient for each micro-batch
    receivers = dict(flows["f"])
    assert {(pid, receivers[number]) for number, pid in flows["s"]} == {(1, 2), (2, 1), (3, 0), (0, 3)}


def test_the_predicted_step_stands_beside_each_rank(site: Site) -> None:
    done = site.train(
        "run.yaml", "--local", "4", "--topology", "four.json", "--set", "steps=10",
        "--set", "parallel={mode: fixed, pp: 2, dp: 2, micro_batch: 2}",
    )  # fmt: skip
    assert done.folder is not None, done.said
    answer = json.loads(site.command("trace", str(done.folder), "--json").stdout)
    assert (answer["step"], answer["predicted"]) == (10, True)
    events = json.loads(Path(answer["trace"]).read_text())["traceEvents"]
    check_schema(events)
    slices = names_by_process(events)
    assert slices.keys() == {*range(4), *range(1_000_000, 1_000_004)}
    for rank in range(4):
        predicted = slices[1_000_000 + rank]
        assert {"optimizer", "reduce dp"} < predicted
        assert predicted <= slices[rank]


def test_another_step_and_one_that_was_not_recorded(site: Site, run: Outcome) -> None:
    assert run.folder is not None
    done = site.command("trace", str(run.folder), "--step", "5", "-o", "five.json")
    assert done.returncode == 0, done.stderr
    trace = json.loads((site.path / "five.json").read_text())
    check_schema(trace["traceEvents"])
    assert trace["otherData"]["step"] == 5
    done = site.command("trace", str(run.folder), "--step", "7")
    assert done.returncode == 2
    assert "--step: found 7; recorded are 5, 10; to record step 7, name it in the run file" in done.stderr
