"""The folder of a model is made whole or not at all, and what killed commands left goes with the next one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base import atomic
from hpctrain.base.errors import InputError
from hpctrain.hf.output import check_output, made_whole


def test_an_error_leaves_nothing_and_keeps_the_model_before(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with made_whole(output, force=True) as made:
        (made / "model.safetensors").write_text("first")
    with pytest.raises(FileNotFoundError), made_whole(output, force=True) as made:
        (made / "model.safetensors").rename(made / "gone")
    assert (output / "model.safetensors").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_leftovers_of_killed_commands_go_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    output = tmp_path / "out[1]"
    (tmp_path / ".out[1].0123abcd.tmp").mkdir()
    (tmp_path / ".other.0123abcd.tmp").mkdir()
    (tmp_path / ".out[1].aaaabbbb.tmp").symlink_to(tmp_path / ".other.0123abcd.tmp")
    with made_whole(output, force=True) as first:
        assert not (tmp_path / ".out[1].0123abcd.tmp").exists()
        with made_whole(output, force=True):
            assert first.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".other.0123abcd.tmp", ".out[1].aaaabbbb.tmp", "out[1]",
    ]  # fmt: skip
    assert (tmp_path / ".other.0123abcd.tmp").is_dir()


def test_force_replaces_a_model_of_any_kind_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "model.safetensors.index.json").write_text("{}")
    check_output(output, force=True)
    with pytest.raises(InputError, match="--force"):
        check_output(output, force=False)
    (output / "model.safetensors.index.json").unlink()
    for name in (".metadata", "__0_0.distcp"):
        (output / name).touch()
    with pytest.raises(InputError, match="holds other things"):  # such as the checkpoint of a run
        check_output(output, force=True)
    (output / "tokenizer.json").touch()
    check_output(output, force=True)
    (output / "code").mkdir()
    with pytest.raises(InputError, match=r"replaces a folder with a model \(model\.safetensors, or \.metadata and"):
        check_output(output, force=True)


def test_a_run_folder_takes_no_other_model(tmp_path: Path) -> None:
    """A model in `checkpoints` would be taken for one of the run's checkpoints."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.yaml").touch()
    check_output(run / "out", force=False)  # a folder with a run file, as `hpctrain init` leaves it
    (run / "generations").mkdir()
    for output in (run, run / "out", run / "checkpoints" / "step-00000099"):
        with pytest.raises(InputError, match="lies in the folder of the run run; name a folder outside of it"):
            check_output(output, force=True)
    check_output(tmp_path / "out", force=False)


def test_a_folder_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    output = tmp_path / "out"
    for force, said in ((False, r"holds thesis\.tex; name a new folder"), (True, "holds other things")):
        making = made_whole(output, force)
        making.__enter__()
        output.mkdir(exist_ok=True)
        (output / "thesis.tex").write_text("all of it")
        with pytest.raises(InputError, match=said):
            making.__exit__(None, None, None)
    assert (output / "thesis.tex").read_text() == "all of it"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(OSError, match="not empty"):
        atomic.swap(Path(shutil.copytree(output, tmp_path / "new")), output, replace=False)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_replaced_model_that_could_not_be_removed_goes_with_the_next_one(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process were killed right after the new model has the name: the name is never without a model."""
    output = tmp_path / "out"
    if not exchanges:
        monkeypatch.setattr(atomic, "exchange_paths", lambda *_: False)
    with made_whole(output, force=False) as made:
        (made / "model.safetensors").write_text("first")

    def killed(*_: Any, **__: Any) -> None:
        assert (output / "model.safetensors").read_text() == "second"

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with made_whole(output, force=True) as made:
            (made / "model.safetensors").write_text("second")
    (old,) = (path for path in tmp_path.iterdir() if path != output)
    assert (old / "model.safetensors").read_text() == "first"
    with made_whole(output, force=True) as made:
        assert not old.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_new_folder_that_another_command_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other command takes it for the folder of a killed one, until it is locked."""
    real = Path.mkdir
    removed: list[Path] = []

    def mkdir(path: Path, *args: Any, **named: Any) -> None:
        real(path, *args, **named)
        if path.suffix == ".tmp" and not removed:
            removed.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with made_whole(tmp_path / "out", force=False) as made:
        (made / "model.safetensors").touch()
        assert removed != [made]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
