"""Going on in a run folder: what was planned for other settings is planned again."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_clock import FakeClock

from hpctrain.base.process import SystemRunner
from hpctrain.launch import training
from hpctrain.launch.folder import create_run_folder
from hpctrain.records.plan import Plan, Replica, Stage
from hpctrain.records.run import Run

RUN = Run.model_validate(
    {
        "steps": 10, "model": {"dims": {"layers": 4, "dim": 32, "heads": 4, "vocab": 64}},
        "data": {"train": ["/data"]}, "batch": {"global": 8},
    }
)  # fmt: skip
PLAN = Plan(
    pp=1, dp=1, tp=2, stages=[Stage(layers=(0, 4))], ranks=["local0:cpu0", "local0:cpu1"],
    replicas=[Replica(rows=8, micro_batch=4, micro_batches=2, devices=[["local0:cpu0", "local0:cpu1"]])],
)  # fmt: skip


@pytest.mark.parametrize(("override", "kept"), [("compile=true", False), ("steps=20", True)])
def test_a_plan_is_put_aside_when_what_it_was_made_for_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, kept: bool
) -> None:
    folder = create_run_folder(tmp_path, RUN, None, PLAN, 0.0).path
    monkeypatch.setattr(training, "settle", lambda run, runner, code: (run, run.spec()))
    monkeypatch.setattr(training, "start_local_job", lambda *given: None)
    training.resume(folder, 1, (override,), SystemRunner(), FakeClock())
    assert (folder / "plan.json").exists() == kept
    assert (folder / "before-0-plan.json").exists() != kept
