"""`hpctrain demo --model`: each kind of model is a run that says what it learns."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from run_folders import event, submitted_run

from hpctrain.cli.demo import NODE_DIES_AT, STARTERS, WORKER_DIES_AT
from hpctrain.launch.starter import render
from hpctrain.records.metric import BytesSent, MetricRow
from hpctrain.records.run import Run
from hpctrain.records.yaml_file import parse_yaml

Call = Callable[..., Any]


@pytest.mark.parametrize(("model", "objective"), [("decoder", "next_token"), ("encoder", "masked")])
def test_a_demo_trains_that_model_by_its_objective(model: str, objective: str) -> None:
    run = Run.from_json(parse_yaml(render(STARTERS[model])).value)
    assert (run.spec().family, run.learned().mode) == (model, objective)
    # There is a checkpoint to go on from at each fault, and steps after the last one.
    assert run.checkpoint.every < WORKER_DIES_AT < NODE_DIES_AT < run.steps


def test_another_model_is_told_what_is_allowed(call: Call, tmp_path: Path) -> None:
    done = call("demo", "--model", "bert")
    assert done.code == 2
    assert "'bert' is not one of 'decoder', 'encoder'" in done.err
    assert not list(tmp_path.iterdir())


def test_without_plotly_the_demo_ends_well_and_says_what_is_left_out(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything before the report needs the plain install alone; it is stood in for by a run that is done."""
    demo = importlib.import_module("hpctrain.cli.demo")
    finished = event("finished", step=10)
    folder = submitted_run(tmp_path / "demo" / "runs", None, finished)
    row = MetricRow(
        step=1, generation=0, time_s=0.0, step_time_s=1.0, loss=2.0, lr=1e-3, tokens=8, samples=1, tokens_per_s=8.0,
        bytes_sent=BytesSent(), stage_time_s=[1.0], micro_batches=[1],
    )  # fmt: skip
    (folder / "metrics.jsonl").write_text(json.dumps(row.to_json()) + "\n")
    (tmp_path / "demo" / demo.MARK).touch()
    for stage in ("_text", "_probe", "_plan"):
        monkeypatch.setattr(demo, stage, lambda *_: None)
    monkeypatch.setattr(demo, "_train", lambda *_: folder)

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(resources, "files", missing)
    done = call("demo")
    assert (done.code, done.err) == (0, "")
    assert "pip install 'hpctrain[report]'" in done.out
    assert f"Everything but the page is in {folder}" in done.out
    assert not (folder / "report.html").exists()
