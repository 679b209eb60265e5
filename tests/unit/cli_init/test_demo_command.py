"""`hpctrain demo --model`: each kind of model is a run that says what it learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import submitted_run

from hpctrain.cli.commands.demo import NODE_DIES_AT, STARTERS, WORKER_DIES_AT
from hpctrain.launch.starter import render
from hpctrain.records.format.yaml_file import parse_yaml
from hpctrain.records.history.run_log import BytesSent, MetricRow
from hpctrain.records.run.run import Run

Call = Callable[..., Any]


@pytest.mark.parametrize(("model", "objective"), [("decoder", "next_token"), ("encoder", "masked")])
def test_a_demo_trains_that_model_by_its_objective(model: str, objective: str) -> None:
    run = Run.from_json(parse_yaml(render(STARTERS[model])).value)
    assert (run.spec().family, run.effective_objective().mode) == (model, objective)
    # There is a checkpoint to go on from at each fault, and steps after the last one.
    assert run.checkpoint.every < WORKER_DIES_AT < NODE_DIES_AT < run.steps


def test_another_model_is_told_what_is_allowed(call: Call, tmp_path: Path) -> None:
    done = call("demo", "--model", "bert")
    assert done.code == 2
    assert "'bert' is not one of 'decoder', 'encoder'" in done.err
    assert not list(tmp_path.iterdir())


def test_a_demo_ends_with_its_report(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = MetricRow(
        step=1, generation=0, time_s=1.8e9, step_time_s=1.0, loss=2.5, lr=1e-3, grad_norm=1.0, tokens=8, samples=1,
        tokens_per_s=8.0, bytes_sent=BytesSent(dp=0, pp=0), stage_time_s=[1.0], bubble_fraction=None,
        micro_batches=[1], memory_bytes_max=1e6,
    )  # fmt: skip

    def trained(folder: Path, *_: object) -> Path:
        run_folder = submitted_run(folder / "runs", None)
        (run_folder / "metrics.jsonl").write_text(json.dumps(row.to_json()) + "\n")
        return run_folder

    for name in ("_text", "_probe", "_plan"):
        monkeypatch.setattr(f"hpctrain.cli.commands.demo.{name}", lambda *_: None)
    monkeypatch.setattr("hpctrain.cli.commands.demo._train", trained)
    done = call("demo", "-o", "demo")
    assert done.code == 0, done.err
    report = next((tmp_path / "demo" / "runs").glob("*")) / "report.html"
    assert report.exists()
    assert "loss 2.500 -> 2.500 in 1 steps" in done.out
    assert f". Open {report}" in done.out
    done = call("demo", "-o", "other", "--json")
    assert "loss 2.500 -> 2.500 in 1 steps" in done.err
    answer = json.loads(done.out)
    assert list(answer) == ["folder", "run_folder", "report", "seconds"]
    assert Path(answer["report"]).exists()
