"""Room for the checkpoints that are kept and the one being written is looked for before the run starts."""

from __future__ import annotations

from pathlib import Path

from run_folders import RUN

from hpctrain.records.model.families import PRESETS
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.runs import file_system
from hpctrain.runs.file_system import checkpoint_space_warning

SPEC = PRESETS["tiny-1m"].model_copy(update={"vocab": 256})


def test_a_run_that_fits_says_nothing(tmp_path: Path) -> None:
    run = Run.model_validate(RUN)
    assert checkpoint_space_warning(run, SPEC, tmp_path / "runs", None) == []


def test_too_little_room_is_said_with_both_figures_and_what_to_do(tmp_path: Path, monkeypatch) -> None:
    run = Run.model_validate({**RUN, "checkpoint": {"keep": 4}})
    one = 12 * SPEC.parameters()
    monkeypatch.setattr(file_system, "free_bytes", lambda path: 5 * one)
    assert checkpoint_space_warning(run, SPEC, tmp_path, None) == []
    monkeypatch.setattr(file_system, "free_bytes", lambda path: 5 * one - 1)
    (said,) = checkpoint_space_warning(run, SPEC, tmp_path, None)
    assert said.startswith(f"{tmp_path}: ")
    assert "are free; 5 checkpoints of" in said
    assert "lower checkpoint.keep" in said


def test_every_replica_adds_what_it_has_not_sent_of_its_gradients(tmp_path: Path, monkeypatch) -> None:
    devices = [[["a:cpu0"]], [["b:cpu0"]]]
    plan = Plan.model_validate({
        "pp": 1, "dp": 2, "tp": 1, "stages": [{"layers": [0, SPEC.layers]}], "ranks": ["a:cpu0", "b:cpu0"],
        "replicas": [{"rows": 1, "micro_batch": 1, "micro_batches": 1, "devices": each} for each in devices],
        "compression": [{"codec": {"mode": "topk", "residual": "bf16"}}],
    })  # fmt: skip
    run = Run.model_validate({**RUN, "checkpoint": {"keep": 1}, "compression": {"mode": "auto"}})
    monkeypatch.setattr(file_system, "free_bytes", lambda path: 2 * (12 + 2 * 2) * SPEC.parameters())
    assert checkpoint_space_warning(run, SPEC, tmp_path, plan) == []
    monkeypatch.setattr(file_system, "free_bytes", lambda path: 2 * (12 + 2 * 2) * SPEC.parameters() - 1)
    assert len(checkpoint_space_warning(run, SPEC, tmp_path, plan)) == 1
    assert checkpoint_space_warning(run, SPEC, tmp_path, None) == []
