"""The loss of a model does not depend on the number of processes, and the progress is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.worker.verbs import evaluate as verb
from hpctrain.worker.verbs.evaluate import EvaluateRequest, evaluate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with data and without checkpoints."""
    (tmp_path / "a.txt").write_text("some words " * 50)
    prepare([tmp_path / "a.txt"], tmp_path / "data")
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    dims = {"family": "gpt2", "layers": 1, "dim": 16, "heads": 2, "vocab": 257, "positions": 32}
    run = {
        "steps": 10, "seed": 5, "model": {"dims": dims}, "data": {"train": [str(tmp_path / "data")], "seq_len": 32},
        "batch": {"global": 2},
    }  # fmt: skip
    (path / "run.yaml").write_text(yaml.safe_dump(run))
    return path


@pytest.mark.parametrize("samples", [1, 3])
def test_processes_that_the_sequences_do_not_divide_by_give_the_same_loss(
    folder: Path, tmp_path: Path, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data, progress = [str(tmp_path / "data")] * 2, tmp_path / "progress"
    one, two = (
        evaluate(EvaluateRequest(str(folder), None, data, "all", samples, processes, progress=str(progress)))
        for processes in (1, 2)
    )
    assert [item["samples"] for item in two] == [samples, samples]
    assert [item["loss"] for item in two] == pytest.approx([item["loss"] for item in one], rel=1e-6)
    assert progress.read_text().split()[1] == str(2 * samples)


def test_the_progress_counts_the_sequences_of_all_corpora(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "PROGRESS_S", 0.0)
    monkeypatch.setattr(verb, "BATCH_TOKENS", 32)
    told: list[str] = []
    monkeypatch.setattr(verb, "write_text", lambda path, text: told.append(text))
    evaluate(EvaluateRequest(str(folder), None, [str(tmp_path / "data")] * 2, "all", 2, progress=str(tmp_path / "p")))
    assert told == ["0 4", "1 4", "2 4", "3 4"]
