"""Going on in a run folder: what was planned for other settings is planned again."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_clock import FakeClock

from hpctrain.base.errors import CommandError, InputError
from hpctrain.base.process import SystemRunner
from hpctrain.launch import local_run
from hpctrain.records.plan.plan import Plan, Replica, Stage
from hpctrain.records.run.run import Run, read_run
from hpctrain.runs.folder import create_run_folder

RUN = Run.model_validate(
    {
        "steps": 10, "model": {"dims": {"layers": 4, "dim": 32, "heads": 4, "vocab": 64}},
        "data": {"train": ["/data"]}, "batch": {"global": 8},
    }
)  # fmt: skip
PLAN = Plan(
    pp=1, dp=1, tp=2, stages=[Stage(layers=(0, 4))], ranks=["local0:cpu0", "local0:cpu1"],
    replicas=[Replica(sequences=8, micro_batch=4, micro_batches=2, devices=[["local0:cpu0", "local0:cpu1"]])],
)  # fmt: skip


@pytest.mark.parametrize(("override", "kept"), [("compile=true", False), ("steps=20", True)])
def test_a_plan_is_put_aside_when_what_it_was_made_for_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, kept: bool
) -> None:
    folder = create_run_folder(tmp_path, RUN, None, PLAN, 0.0).path
    monkeypatch.setattr(local_run, "resolve_run", lambda run, runner, code: (run, run.spec()))
    monkeypatch.setattr(local_run, "start_local_job", lambda *given: None)
    local_run.resume(folder, 1, (override,), SystemRunner(), FakeClock())
    assert (folder / "plan.json").exists() == kept
    assert (folder / "before-0-plan.json").exists() != kept
    assert read_run(folder / "run-1.yaml") == RUN


def test_what_a_checkpoint_depends_on_stays_here_too(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path, RUN, None, PLAN, 0.0).path
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(InputError, match="--set seed: a run that goes on keeps it"):
        local_run.resume(folder, 1, ("seed=7", "steps=20"), SystemRunner(), FakeClock())
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_start_that_fails_leaves_the_settings_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise CommandError("python: cannot start")

    folder = create_run_folder(tmp_path, RUN, None, None, 0.0).path
    monkeypatch.setattr(local_run, "resolve_run", lambda run, runner, code: (run, run.spec()))
    monkeypatch.setattr(local_run, "start_local_job", fails)
    with pytest.raises(CommandError, match="cannot start"):
        local_run.resume(folder, 1, ("steps=20",), SystemRunner(), FakeClock())
    assert read_run(folder / "run.yaml") == RUN
    assert list(folder.glob("run-*.yaml")) == []
