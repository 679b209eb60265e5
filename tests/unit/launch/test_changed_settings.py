"""Other settings for a run that goes on: what is allowed, and that nothing is half changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import submitted_run

from hpctrain.base.errors import FileError, InputError
from hpctrain.checkpoint.published import describe_file, publish
from hpctrain.launch.preflight.changed_settings import changes_text, run_with_changes, write_changed_settings
from hpctrain.records.history.generation import Fence
from hpctrain.records.history.manifest import Manifest
from hpctrain.records.run.optimizer import StepsChange
from hpctrain.records.run.run import read_run
from hpctrain.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = submitted_run(tmp_path, "7")
    checkpoint = folder / "checkpoints" / ".6"
    checkpoint.mkdir()
    (checkpoint / "0.distcp").write_bytes(b"weights")
    files = [describe_file(checkpoint / "0.distcp")]
    sha256 = read_run(folder / "run.yaml").sha256()
    publish(
        checkpoint,
        Manifest(
            step=6, generation=0, samples=48, seed=0, run_sha256=sha256, model_sha256=sha256, world_size=1, files=files
        ),
        Fence(folder / "generations", 0),
    )
    return folder


def test_nothing_changed_writes_nothing(folder):
    before = sorted(folder.iterdir())
    with write_changed_settings(RunFolder(folder), run_with_changes(folder, ())):
        pass
    assert sorted(folder.iterdir()) == before


def test_the_old_settings_stay_beside_the_new_ones(folder):
    old = (folder / "run.yaml").read_text()
    with write_changed_settings(RunFolder(folder), run_with_changes(folder, ("steps=20", "cluster.nodes=4"))):
        pass
    assert (read_run(folder / "run.yaml").steps, read_run(folder / "run.yaml").cluster.nodes) == (20, "4")
    with write_changed_settings(RunFolder(folder), run_with_changes(folder, ("optimizer.lr=0.1",))):
        pass
    assert (folder / "run-1.yaml").read_text() == old
    assert read_run(folder / "run-2.yaml").steps == 20


def test_a_submission_that_fails_leaves_all_as_it_was(folder):
    (folder / "plan.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    change = run_with_changes(folder, ("compile=true",))

    def submit() -> None:
        with write_changed_settings(RunFolder(folder), change):
            assert not (folder / "plan.json").exists()
            raise InputError("sbatch refused")

    with pytest.raises(InputError, match="sbatch refused"):
        submit()
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("seed=4", "decides the weights and the order of samples"),
        ("data.seq_len=512", "how far this data was read"),
        ("model.preset=mini-10m", "this model's weights"),
        ("batch.global=16", "counts samples in batches"),
        ("cluster.kind=local", "train --resume"),
        ("precision=bf16", "loss scale"),
        ("deterministic=true", "start a new run"),
    ],
)
def test_what_the_checkpoint_depends_on_stays(folder, override, reason):
    with pytest.raises(InputError, match=reason) as caught:
        run_with_changes(folder, (override, "steps=20"))
    assert f"--set {override.partition('=')[0]}: " in str(caught.value)
    assert "allowed are the keys steps, cluster" in str(caught.value)


def test_steps_that_are_done_cannot_be_taken_back(folder):
    with pytest.raises(InputError, match=r"--set steps=6: the newest checkpoint is of step 6; ask for more"):
        run_with_changes(folder, ("steps=6",))
    assert run_with_changes(folder, ("steps=7",)).steps == 7
    (folder / "checkpoints" / "step-00000006" / "0.distcp").write_bytes(b"weig")
    assert run_with_changes(folder, ("steps=6",)).optimizer.steps_changed == []


def test_more_steps_keep_the_warm_up_and_the_rate_that_was_reached(folder):
    """The checkpoint is of step 6 of 10."""
    after = run_with_changes(folder, ("steps=20000",))
    assert after.optimizer.warmup(after.steps) == 1
    assert after.optimizer.steps_changed == [StepsChange(at=6, before=10)]
    with write_changed_settings(RunFolder(folder), after):
        pass
    assert run_with_changes(folder, ("steps=300",)).optimizer == after.optimizer
    assert run_with_changes(folder, ("cluster.nodes=4",)).optimizer == after.optimizer
    with pytest.raises(InputError, match="hpctrain writes it when the number of steps changes"):
        run_with_changes(folder, ("optimizer.steps_changed=[]",))


def test_who_begins_from_the_seed_has_done_no_steps(folder):
    after = run_with_changes(folder, ("steps=5",), from_seed=True)
    assert (after.steps, after.optimizer.steps_changed) == (5, [])
    longer = run_with_changes(folder, ("steps=20000",))
    with write_changed_settings(RunFolder(folder), longer):
        pass
    assert longer.optimizer.steps_changed
    assert run_with_changes(folder, (), from_seed=True).optimizer.steps_changed == []


def test_what_a_change_does_can_be_told_before(folder):
    (folder / "plan-1.json").write_text("{}")
    before = sorted(folder.iterdir())
    assert changes_text(folder, run_with_changes(folder, ())) == []
    assert changes_text(folder, run_with_changes(folder, ("steps=20", "compile=true"))) == [
        "steps: 10 -> 20",
        "compile: False -> True",
        "the settings of before are kept as run-1.yaml",
        "plan-1.json is put aside; another plan is made",
    ]
    assert sorted(folder.iterdir()) == before


def test_a_value_that_is_wrong_is_told_as_in_the_file(folder):
    with pytest.raises(FileError, match="given by --set"):
        run_with_changes(folder, ("steps=none",))
