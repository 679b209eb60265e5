"""What `hpctrain eval` refuses before it starts a process, and what it makes of the answer."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.base.errors import CheckpointError, HpctrainError, InputError
from hpctrain.base.process import WORKER, CommandResult
from hpctrain.checkpoint.published import describe_file, publish
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.launch.evaluate import evaluate
from hpctrain.records.history.generation import Fence
from hpctrain.records.history.manifest import Manifest
from hpctrain.records.run.run import read_run


class Worker:
    """Stands in for the process; keeps what it was asked and looks at the data while it is there."""

    def __init__(self, say: Callable[[dict[str, Any]], tuple[int, str, str]]) -> None:
        self.say = say
        self.asked: dict[str, Any] = {}

    def run(self, argv: list[str], timeout_s: float | None = None, env: object = None) -> CommandResult:
        assert argv[:-1] == [*WORKER, "eval"]
        self.asked = json.loads(argv[-1])
        assert all((Path(path) / "index.json").is_file() for path in self.asked["data"])
        code, stdout, stderr = self.say(self.asked)
        return CommandResult((), code, stdout, stderr)


def of_two(asked: dict[str, Any]) -> tuple[int, str, str]:
    sets = [{"loss": 2.0 + number, "samples": 3, "targets": 96} for number in range(len(asked["data"]))]
    return 0, json.dumps({"sets": sets}), ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with whole checkpoints of steps 5 and 10, and the run's data."""
    (tmp_path / "a.txt").write_text("some words " * 50)
    prepare([tmp_path / "a.txt"], tmp_path / "data")
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    dims = {"layers": 1, "dim": 8, "heads": 2, "vocab": 257}
    run = {
        "steps": 10, "model": {"dims": dims}, "data": {"train": [str(tmp_path / "data")], "seq_len": 32},
        "batch": {"global": 2},
    }  # fmt: skip
    (path / "run.yaml").write_text(yaml.safe_dump(run))
    model = read_run(path / "run.yaml").spec().sha256()
    for step in (5, 10):
        temporary = path / "checkpoints" / f".{step}"
        temporary.mkdir(parents=True)
        (temporary / "0.distcp").write_bytes(b"weights")
        publish(
            temporary,
            Manifest(
                step=step, generation=0, samples=step * 2, seed=0, run_sha256="", model_sha256=model, world_size=1,
                files=[describe_file(temporary / "0.distcp")],
            ),
            Fence(path / "generations", 0),
        )  # fmt: skip
    return path


def test_folders_and_text_are_judged_in_one_process(folder: Path, tmp_path: Path) -> None:
    worker = Worker(of_two)
    data = [str(tmp_path / "data"), str(tmp_path / "a.txt")]
    step, (first, second) = evaluate(folder, data, None, "all", 3, worker)  # type: ignore[arg-type]
    assert step == 10
    assert worker.asked["checkpoint"] == str(folder / "checkpoints" / "step-00000010")
    assert (worker.asked["split"], worker.asked["samples"]) == ("all", 3)
    assert worker.asked["data"][0] == str(tmp_path / "data")
    assert not Path(worker.asked["data"][1]).exists()
    assert (first.path, first.loss, first.tokens, first.targets) == (data[0], 2.0, 96, 96)
    assert (second.path, second.perplexity) == (data[1], pytest.approx(math.exp(3)))


def test_the_newest_whole_checkpoint_counts_unless_a_step_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "checkpoints" / "step-00000010" / "0.distcp").write_bytes(b"cut")
    data = [str(tmp_path / "data")]
    assert evaluate(folder, data, None, "all", None, Worker(of_two))[0] == 5  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"step-00000010: 0\.distcp has 3 bytes.*leave --step out"):
        evaluate(folder, data, 10, "all", None, Worker(of_two))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"--step 7: .* has no checkpoint of that step; it has: 5, 10"):
        evaluate(folder, data, 7, "all", None, Worker(of_two))  # type: ignore[arg-type]
    for step in (5, 10):
        (folder / "checkpoints" / f"step-{step:08}" / "0.distcp").unlink()
    with pytest.raises(InputError, match=r"has no checkpoint yet \(step-00000010: .*checkpoint\.every"):
        evaluate(folder, data, None, "all", None, Worker(of_two))  # type: ignore[arg-type]


def test_the_progress_of_the_worker_is_passed_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.launch.evaluate._PROGRESS_S", 0.01)
    told, seen = [], threading.Event()

    def working(asked: dict[str, Any]) -> tuple[int, str, str]:
        Path(asked["progress"]).write_text("2000 4000")
        assert seen.wait(60)
        return of_two(asked)

    def progress(phase: str, done: int, total: int) -> None:
        told.append((phase, done, total))
        seen.set()

    worker = Worker(working)
    evaluate(folder, [str(tmp_path / "data")], None, "all", None, worker, progress=progress)  # type: ignore[arg-type]
    assert set(told) == {("evaluating 4,000 sequences of 32 tokens", 2000, 4000)}
    assert not Path(worker.asked["progress"]).parent.exists()


def test_a_checkpoint_that_the_run_removes_meanwhile_is_replaced_by_the_next(folder: Path, tmp_path: Path) -> None:
    checkpoints, data = folder / "checkpoints", [str(tmp_path / "data")]

    def removing(asked: dict[str, Any]) -> tuple[int, str, str]:
        if Path(asked["checkpoint"]).name == "step-00000005":
            return of_two(asked)
        shutil.rmtree(asked["checkpoint"])
        return 1, json.dumps({"error": "FileNotFoundError: .metadata"}), ""

    assert evaluate(folder, data, None, "all", None, Worker(removing))[0] == 5  # type: ignore[arg-type]
    shutil.copytree(checkpoints / "step-00000005", checkpoints / "step-00000010")
    with pytest.raises(CheckpointError, match=r"the run removed the checkpoint of step 10 .* checkpoint\.keep"):
        evaluate(folder, data, 10, "all", None, Worker(removing))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"step 10: .* it has: 5"):
        evaluate(folder, data, 10, "all", None, Worker(removing))  # type: ignore[arg-type]

    def endless(asked: dict[str, Any]) -> tuple[int, str, str]:
        path = Path(asked["checkpoint"])
        path.rename(path.with_name(f"step-{int(path.name[5:]) + 1:08}"))
        return 1, json.dumps({"error": "FileNotFoundError: .metadata"}), ""

    with pytest.raises(CheckpointError, match=r"the run removed its checkpoints while .* checkpoint\.keep"):
        evaluate(folder, data, None, "all", None, Worker(endless))  # type: ignore[arg-type]


def test_data_that_the_model_cannot_read_is_refused(folder: Path, tmp_path: Path) -> None:
    prepare([tmp_path / "a.txt"], tmp_path / "bpe", PrepareOptions("train:260"))
    message = r"its tokenizer \(trained .*\) is not that of the run \(bytes, vocabulary 257\); .* --tokenizer bytes$"
    with pytest.raises(InputError, match=message):
        evaluate(folder, [str(tmp_path / "bpe")], None, "all", None, Worker(of_two))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"DATA: .*nowhere: no such file or folder"):
        evaluate(folder, [str(tmp_path / "nowhere")], None, "all", None, Worker(of_two))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ((2, '{"error": "DATA: found 3 tokens"}', ""), InputError, "DATA: found 3 tokens"),
        ((1, '{"error": "the loss is nan"}', ""), HpctrainError, "the loss is nan"),
        ((-9, "", "Killed\n"), HpctrainError, "the process that evaluates ended with code -9: Killed"),
    ],
)
def test_what_the_process_says_of_an_error_is_passed_on(
    folder: Path, tmp_path: Path, said: tuple[int, str, str], kind: type[HpctrainError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        evaluate(folder, [str(tmp_path / "data")], None, "all", None, Worker(lambda _: said))  # type: ignore[arg-type]
    assert type(caught.value) is kind


def test_step_0_needs_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    worker = Worker(of_two)
    assert evaluate(folder, [str(tmp_path / "data")], 0, "all", None, worker)[0] == 0  # type: ignore[arg-type]
    assert worker.asked["checkpoint"] is None


def test_processes_and_stages_are_passed_on_or_refused(folder: Path, tmp_path: Path) -> None:
    worker, data = Worker(of_two), [str(tmp_path / "data")]
    evaluate(folder, data, None, "all", None, worker, processes=4, pp=1)  # type: ignore[arg-type]
    assert (worker.asked["processes"], worker.asked["pp"]) == (4, 1)
    for processes, pp, message in (
        (4, 3, r"^--pp 3: .* allowed: divisors of --processes 4$"),
        (4, 2, r"^--pp 2: the model has 1 layers; allowed: up to one stage a layer$"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(folder, data, None, "all", None, worker, processes, pp)  # type: ignore[arg-type]
